"""Metrics of the Hub, `hub:owner/name@COMMIT`: the code of one commit, and no other.

Not by `evaluate.load`: that takes owner/name/name.py of the working directory before the Hub's, and where the Hub does
not answer, the newest commit that it has ever loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType

from training.metrics.base import evaluate, refused
from training.problems import NETWORK, Problem, UserError

PREFIX = "hub:"


@cache
def load(name: str) -> type[evaluate.Metric]:
    """The metric's class, of the one file that the repository is named like. Runs that file.

    With HF_HUB_OFFLINE it must have been loaded before. Raises UserError where it cannot be had, or run.
    """
    repository, _, commit = name.removeprefix(PREFIX).partition("@")
    file = f"{repository.partition('/')[2]}.py"
    module = _imported(name, f"hub_metric_{commit}_{file.removesuffix('.py')}", _downloaded(name, repository, commit))
    for found in vars(module).values():
        if isinstance(found, type) and issubclass(found, evaluate.Metric) and found.__module__ == module.__name__:
            return found
    raise refused(f"{name!r}: its {file} defines no evaluate.Metric.")


def _downloaded(name: str, repository: str, commit: str) -> str:
    from httpx2 import HTTPError
    from huggingface_hub import hf_hub_download, is_offline_mode
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    file = f"{repository.partition('/')[2]}.py"
    try:
        return str(hf_hub_download(repository, file, repo_type="space", revision=commit))
    except LocalEntryNotFoundError as error:
        raise _unanswered(name, error, is_offline_mode()) from error
    except EntryNotFoundError as error:
        raise refused(f"{name!r} has no {file}: metrics of the Hub are Spaces with a file of their name.") from error
    except RevisionNotFoundError as error:
        raise refused(f"{name!r}: there is no such commit of {repository}.") from error
    except RepositoryNotFoundError as error:
        message = f"the Hub has no Space {repository!r}, or it is private: check the name, and set HF_TOKEN if it is."
        raise refused(message) from error
    except HTTPError as error:
        raise _unanswered(name, error, is_offline_mode()) from error


def _unanswered(name: str, error: BaseException, offline: bool) -> UserError:
    while error.__cause__ is not None:  # the clients wrap it in advice of their own
        error = error.__cause__
    why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    mend = "unset HF_HUB_OFFLINE" if offline else "check the network"
    message = f"the Hub cannot be asked for {name!r} ({why}): {mend}, then run the same command again."
    return UserError([Problem(kind=NETWORK, where="evaluation.metrics", message=message)])


def _imported(name: str, module_name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise refused(f"running {name!r} failed: {type(error).__name__}: {error}") from error
    return module
