"""Look-ups at the Hugging Face Hub, and its errors as one message with the next step."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tasks.cache.history import History
from tasks.cache.refs import PinnedCommit
from tasks.cache.settings import without_credentials
from training.problems import NETWORK, Problem, UserError, server_fault

METADATA_TIMEOUT_S = 10.0

Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class Found:
    """What a revision of a repository is now."""

    pin: PinnedCommit
    files: tuple[str, ...] | None = None
    """Their paths in the repository; None where the Hub did not say."""
    reachable: bool = True
    """Whether the Hub was asked and answered; else the commit is that of the last run."""


def look_up(kind: Kind, path: str, revision: str | None, history: History) -> Found:
    """What a revision of a repository is now.

    Asks for metadata only. A revision that is a commit already is not looked up. If the Hub cannot be reached, the
    commit is the last one that the history has of this name.
    Raises UserError for a repository or revision that is missing, gated or private.
    """
    revision = revision or "main"
    name = f"{path}@{revision}"
    if re.fullmatch("[0-9a-f]{40}", revision):
        return Found(PinnedCommit(name=name, commit=revision))
    from huggingface_hub import HfApi

    hub = HfApi()
    ask = hub.model_info if kind == "model" else hub.dataset_info
    try:
        with told(kind, path, revision):
            info = ask(path, revision=revision, timeout=METADATA_TIMEOUT_S)
            if info.gated:
                # Anybody may see what a gated repository holds; whether its files may be had is asked apart.
                hub.auth_check(path, repo_type=kind)
    except UserError as error:
        last = history.last_commit(kind, name)
        if last is None or any(problem.kind != NETWORK for problem in error.problems):
            raise
        return Found(last, reachable=False)
    files = tuple(file.rfilename for file in info.siblings or ())
    return Found(PinnedCommit(name=name, commit=str(info.sha)), files)


def page_of(kind: Kind, path: str) -> str:
    """The address of a repository for people, on the Hub that HF_ENDPOINT names."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return f"{without_credentials(endpoint).rstrip('/')}/{'datasets/' if kind == 'dataset' else ''}{path}"


@contextlib.contextmanager
def told(kind: Kind, path: str, revision: str) -> Iterator[None]:
    """Makes one UserError, with the next step, of whatever the clients of the Hub raise in the block."""
    from httpx2 import HTTPError
    from huggingface_hub.errors import (
        CachedRepoTreeNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    part = "data" if kind == "dataset" else "model"
    try:
        yield
    except GatedRepoError as error:
        message = f"{path!r} is gated: ask for access on its page, then set HF_TOKEN."
        raise _problem(f"{part}.path", message) from error
    except RepositoryNotFoundError as error:
        message = (
            f"the Hub has no {kind} {path!r}, or it is private: check the name, and set HF_TOKEN if it is private."
        )
        raise _problem(f"{part}.path", message) from error
    except RevisionNotFoundError as error:
        message = f"{path!r} has no revision {revision!r}: name a branch, a tag or a commit."
        raise _problem(f"{part}.revision", message) from error
    except HFValidationError as error:
        raise _problem(f"{part}.path", f"{path!r} is not a name of the Hub's: write owner/name.") from error
    except (HTTPError, OSError, CachedRepoTreeNotFoundError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise  # of this machine, such as a full disk: what the clients make up themselves has no number
        raise _unanswered(f"{part}.path", path, revision, error) from error


def _unanswered(where: str, path: str, revision: str, error: Exception) -> UserError:
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        message = f"the Hub refuses to show {path!r} with this access token: set HF_TOKEN to one that may read it."
        return _problem(where, message)
    mend = "unset HF_HUB_OFFLINE" if is_offline_mode() else "check the network"
    mend += ", then run the same command again."
    if fault := server_fault(error):
        error, mend = fault, "the fault is the Hub's. Run the same command again later."
    return _problem(where, f"the Hub cannot be asked for {path!r} at {revision!r} ({why(error)}): {mend}", NETWORK)


def why(error: BaseException) -> str:
    """The first error of a chain, in few words and without passwords: the clients wrap it in advice of their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return without_credentials(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": "))


def _problem(where: str, message: str, kind: str = "hub") -> UserError:
    return UserError([Problem(kind=kind, where=where, message=message)])
