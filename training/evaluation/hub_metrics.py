"""Metrics of the Hub: `hub:owner/name@COMMIT`, the code of exactly this commit.

The file is downloaded when a run begins, because jobs have no network. `evaluate.load` is not used: it prefers
owner/name/name.py of the working directory, and without the Hub it takes the newest commit that it has ever loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from training.problems import NETWORK, UserError, server_error

if TYPE_CHECKING:
    import evaluate

PREFIX = "hub:"


def parse_name(name: str) -> tuple[str, str, str]:
    """The repository, the file in it, and the commit."""
    repository, _, commit = name.removeprefix(PREFIX).partition("@")
    return repository, f"{repository.partition('/')[2]}.py", commit


def fetch(name: str) -> str:
    """Downloads the metric's file at its commit, unless the Hub's cache has it. Returns its path; runs nothing.

    Raises UserError if that fails.
    """
    from httpx2 import HTTPError
    from huggingface_hub import hf_hub_download, is_offline_mode
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, file, commit = parse_name(name)
    try:
        return str(hf_hub_download(repository, file, repo_type="space", revision=commit))
    except LocalEntryNotFoundError as error:
        raise _connection_error(name, error, is_offline_mode()) from error
    except EntryNotFoundError as error:
        raise UserError.of(
            "metrics",
            "evaluation.metrics",
            f"{name!r} has no {file}: metrics of the Hub are Spaces with a file of their name.",
        ) from error
    except RevisionNotFoundError as error:
        raise UserError.of(
            "metrics", "evaluation.metrics", f"{name!r}: there is no such commit of {repository}."
        ) from error
    except RepositoryNotFoundError as error:
        message = f"the Hub has no Space {repository!r}, or it is private: check the name, and set HF_TOKEN if it is."
        raise UserError.of("metrics", "evaluation.metrics", message) from error
    except HTTPError as error:
        raise _connection_error(name, error, is_offline_mode()) from error


@cache
def load_hub_metric(name: str) -> type[evaluate.Metric]:
    """The metric's class, from the file with the repository's name. Runs that file.

    With HF_HUB_OFFLINE the file must be in the cache. Raises UserError if it cannot be downloaded or run.
    """
    import evaluate  # here, because the flow downloads files without it

    _, file, commit = parse_name(name)
    module = _import_file(name, f"hub_metric_{commit}_{file.removesuffix('.py')}", fetch(name))
    for found in vars(module).values():
        if isinstance(found, type) and issubclass(found, evaluate.Metric) and found.__module__ == module.__name__:
            return found
    raise UserError.of("metrics", "evaluation.metrics", f"{name!r}: its {file} defines no evaluate.Metric.")


def _import_file(name: str, module_name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise UserError.of(
            "metrics", "evaluation.metrics", f"running {name!r} failed: {type(error).__name__}: {error}"
        ) from error
    return module


def _connection_error(name: str, error: BaseException, offline: bool) -> UserError:
    fault = server_error(error)
    while error.__cause__ is not None:  # the clients wrap it in their advice
        error = error.__cause__
    cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    next_step = f"{'unset HF_HUB_OFFLINE' if offline else 'check the network'}, then run the same command again."
    if fault:
        next_step = "the fault is the Hub's. Run the same command again later."
    message = f"{name!r} could not be downloaded from the Hub ({cause}): {next_step}"
    return UserError.of(NETWORK, "evaluation.metrics", message)
