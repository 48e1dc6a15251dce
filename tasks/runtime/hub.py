"""The Hugging Face Hub: what a name means there, in one message when it means nothing."""

from __future__ import annotations

import re
from typing import Literal

from training.problems import Problem, UserError

METADATA_TIMEOUT_S = 10.0


def commit_of(kind: Literal["model", "dataset"], name: str, revision: str, last: str | None) -> tuple[str, list[str]]:
    """The commit (40 hex digits) that a revision of a repository is now, and what to tell the user.

    Asks for metadata only. A revision that is a commit already is not looked up. Where the Hub cannot be reached,
    the commit that the name last meant is used, and said.
    Raises UserError for a repository or revision that is missing, gated or private.
    """
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision, []
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{'data' if kind == 'dataset' else 'model'}.path"
    try:
        info = HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=METADATA_TIMEOUT_S)
        if info.sha is None:
            raise _problem(where, f"the Hub gives no commit for {name!r} at {revision!r}: try again later.")
        return info.sha, []
    except GatedRepoError as error:
        message = f"{name!r} is gated: ask for access on its page, then set HF_TOKEN."
        raise _problem(where, message) from error
    except RepositoryNotFoundError as error:
        message = (
            f"the Hub has no {kind} {name!r}, or it is private: check the name, and set HF_TOKEN if it is private."
        )
        raise _problem(where, message) from error
    except RevisionNotFoundError as error:
        message = f"{name!r} has no revision {revision!r}: name a branch, a tag or a commit."
        raise _problem(where.replace("path", "revision"), message) from error
    except HFValidationError as error:
        raise _problem(where, f"{name!r} is not a name of the Hub's: write owner/name.") from error
    except (OfflineModeIsEnabled, HTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            message = f"the Hub refuses to show {name!r} with this access token: set HF_TOKEN to one that may read it."
            raise _problem(where, message) from error
        if last:
            return last, [f"the Hub cannot be asked for {name!r}: using commit {last[:12]}, as last time"]
        message = f"the Hub cannot be asked for {name!r} at {revision!r} ({type(error).__name__}): check the network,"
        raise _problem(where, f"{message} or name a commit of 40 hex digits that is stored here.") from error


def _problem(where: str, message: str) -> UserError:
    return UserError([Problem(kind="hub", where=where, message=message)])
