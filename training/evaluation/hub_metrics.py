"""Metrics of the Hub, `hub:owner/name@COMMIT`: the code of one commit, and no other.

The file is fetched when a run begins, for its jobs have no network. `evaluate.load` is not used: it takes
owner/name/name.py of the working directory before the Hub's, and where the Hub does not answer, the newest commit that
it has ever loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from training.problems import NETWORK, Problem, UserError, server_fault

if TYPE_CHECKING:
    import evaluate

PREFIX = "hub:"


def place(name: str) -> tuple[str, str, str]:
    """The repository, the file in it, and the commit."""
    repository, _, commit = name.removeprefix(PREFIX).partition("@")
    return repository, f"{repository.partition('/')[2]}.py", commit


def fetched(name: str) -> str:
    """The path of the metric's one file, as the commit has it: in the clients' own cache, or fetched. Runs nothing.

    Raises UserError where it cannot be had.
    """
    from httpx2 import HTTPError
    from huggingface_hub import hf_hub_download, is_offline_mode
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, file, commit = place(name)
    try:
        return str(hf_hub_download(repository, file, repo_type="space", revision=commit))
    except LocalEntryNotFoundError as error:
        raise _unanswered(name, error, is_offline_mode()) from error
    except EntryNotFoundError as error:
        raise _refused(f"{name!r} has no {file}: metrics of the Hub are Spaces with a file of their name.") from error
    except RevisionNotFoundError as error:
        raise _refused(f"{name!r}: there is no such commit of {repository}.") from error
    except RepositoryNotFoundError as error:
        message = f"the Hub has no Space {repository!r}, or it is private: check the name, and set HF_TOKEN if it is."
        raise _refused(message) from error
    except HTTPError as error:
        raise _unanswered(name, error, is_offline_mode()) from error


@cache
def load_hub_metric(name: str) -> type[evaluate.Metric]:
    """The metric's class, of the one file that the repository is named like. Runs that file.

    With HF_HUB_OFFLINE it must have been fetched before. Raises UserError where it cannot be had, or run.
    """
    import evaluate  # here, for the flow fetches files without it

    _, file, commit = place(name)
    module = _imported(name, f"hub_metric_{commit}_{file.removesuffix('.py')}", fetched(name))
    for found in vars(module).values():
        if isinstance(found, type) and issubclass(found, evaluate.Metric) and found.__module__ == module.__name__:
            return found
    raise _refused(f"{name!r}: its {file} defines no evaluate.Metric.")


def _imported(name: str, module_name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise _refused(f"running {name!r} failed: {type(error).__name__}: {error}") from error
    return module


def _unanswered(name: str, error: BaseException, offline: bool) -> UserError:
    fault = server_fault(error)
    while error.__cause__ is not None:  # the clients wrap it in advice of their own
        error = error.__cause__
    why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    mend = f"{'unset HF_HUB_OFFLINE' if offline else 'check the network'}, then run the same command again."
    if fault:
        mend = "the fault is the Hub's. Run the same command again later."
    message = f"the Hub cannot be asked for {name!r} ({why}): {mend}"
    return UserError([Problem(kind=NETWORK, where="evaluation.metrics", message=message)])


def _refused(message: str) -> UserError:
    return UserError([Problem(kind="metrics", where="evaluation.metrics", message=message)])
