"""The files of metrics of the Hub, `hub:owner/name@COMMIT`: fetched when a run begins, for its jobs have no network."""

from __future__ import annotations

from training.problems import NETWORK, Problem, UserError, server_fault

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
