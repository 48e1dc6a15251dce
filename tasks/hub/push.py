"""Push of files to a branch on the Hugging Face Hub, in one commit; unchanged files make no commit."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.environment import ACCESS_TOKENS, HUB, passed
from tasks.hub.client import find_cause
from training.jobs.protocol import Settings, sha256
from training.problems import NETWORK, Problem, UserError, server_fault
from training.recipe import Recipe

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import Discussion, HfApi
    from huggingface_hub.hf_api import RepoFile

TIMEOUT_S = 300.0
"""Read time-out, which the clients lack by default; the server may take minutes for a large commit."""


class PublishSettings(Settings):
    """Settings of tasks.hub.publish_model."""

    repo: str
    revision: str
    private: bool
    """Whether a new repository is private."""
    pull_request: bool
    title: str
    """Title of the commit or pull request."""
    files: dict[str, str]
    """Local files by their paths in the repository."""


@dataclass(frozen=True)
class Place:
    """A branch of a model's repository."""

    repo: str
    revision: str
    private: bool
    """Whether a new repository is private."""


@dataclass(frozen=True)
class Pushed:
    """The state of a branch, or a pull request, after a push."""

    revision: str
    """The branch, or `refs/pr/N`."""
    commit: str
    url: str
    is_new: bool
    """Whether the push made a commit."""


def build_environment() -> dict[str, str]:
    """The variables of a child program that writes to the Hub; no other program gets the access token."""
    offline = os.environ.get("HF_HUB_OFFLINE", "0")
    # The clients' warnings may contain URLs with signatures.
    return {**passed(HUB), "HF_HUB_OFFLINE": offline, "HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def find_publishing_problems(recipe: Recipe) -> Iterator[Problem]:
    """Finds problems of publishing before training, without a request to the Hub: an error if there is no access token,
    and a warning if models are published without a comparison."""
    hub = recipe.release.hub
    if hub is None:
        return
    # A CI job may exchange its identity for a token, which needs a request.
    if not os.environ.get("HF_OIDC_RESOURCE") and not _has_token():
        yield from _build_token_error(hub.repo).problems
    if recipe.release.registry is None:
        message = (
            "there is no champion to compare with, so every model within release.gate's bounds is published: set "
            "release.registry to publish only better models."
        )
        yield Problem(kind="release", where="release.hub", message=message, level="warning")


def _has_token() -> bool:
    """Whether the environment or an earlier login has a token. Not by huggingface_hub's get_token, which may send a
    request to renew the token."""
    from huggingface_hub.constants import HF_TOKEN_PATH

    file = Path(HF_TOKEN_PATH)
    return any(os.environ.get(name, "").strip() for name in ACCESS_TOKENS) or (
        file.is_file() and bool(file.read_text().strip())
    )


def connect(repo: str) -> HfApi:
    """Creates a client that may write. Call this only in a child program: it changes the clients of the whole process.
    Raises UserError without an access token."""
    from huggingface_hub import HfApi, get_token, set_client_factory

    set_client_factory(_create_client)
    if get_token() is None:
        raise _build_token_error(repo)
    return HfApi()


def _build_token_error(repo: str) -> UserError:
    return UserError.of(
        "hub", "release.hub.repo", f"{repo!r} cannot be written without an access token: set HF_TOKEN to one that may."
    )


def _create_client() -> httpx2.Client:
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = TIMEOUT_S
    return client


def push(
    hub: HfApi,
    place: Place,
    files: Mapping[str, Path],
    *,
    title: str,
    replaced: Callable[[str], bool],
    pull_request: bool = False,
) -> Pushed:
    """Commits the files to the branch, by their paths in the repository.

    The same commit removes all other files for whose paths `replaced` is true. A missing repository or branch is
    created. With `pull_request`, the commit goes to an open pull request with the same title, otherwise to a new one.
    Files that the Hub has are not sent again, and unchanged files make no commit.
    Raises UserError with the next step if the Hub does not answer or refuses.
    """
    with explain_write_errors(place.repo, place.revision):
        _create_place(hub, place)
        change = _find_change(hub, place.repo, place.revision, files, replaced)
        if pull_request and change.operations:
            for other in _list_pull_requests(hub, place.repo):
                if other.title == title:
                    change = _find_change(hub, place.repo, str(other.git_reference), files, replaced)
                    return _commit(hub, place.repo, change, title, url=other.url)
        return _commit(hub, place.repo, change, title, pull_request=pull_request)


def _list_pull_requests(hub: HfApi, repo: str) -> list[Discussion]:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return list(hub.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open"))
    except HfHubHTTPError as error:
        if error.response.status_code != 404:
            raise
        message = f"{repo!r} takes no pull requests ({_describe_cause(error)}): turn them on in its settings"
        message += ", or set this to false."
        raise UserError.of("hub", "release.hub.pull_request", message) from error


def _create_place(hub: HfApi, place: Place) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        refs = hub.list_repo_refs(place.repo)
    except RepositoryNotFoundError:
        hub.create_repo(place.repo, private=place.private, exist_ok=True)
        refs = hub.list_repo_refs(place.repo)
    if place.revision not in {branch.name for branch in refs.branches}:
        hub.create_branch(place.repo, branch=place.revision, exist_ok=True)


@dataclass(frozen=True)
class _Change:
    revision: str
    head: str
    operations: list[Any]
    """huggingface_hub's commit operations: additions and deletions."""


def _find_change(
    hub: HfApi, repo: str, revision: str, files: Mapping[str, Path], replaced: Callable[[str], bool]
) -> _Change:
    """Finds the operations that bring a revision to these files, by the Hub's digests."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.hf_api import RepoFile

    head = str(hub.model_info(repo, revision=revision).sha)
    listed = hub.list_repo_tree(repo, recursive=True, revision=head)
    existing = {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}
    obsolete = [path for path in existing if path not in files and replaced(path)]
    changed = [path for path, file in files.items() if path not in existing or not _is_same(file, existing[path])]
    additions = [CommitOperationAdd(path, files[path]) for path in changed]
    return _Change(revision, head, [*additions, *map(CommitOperationDelete, obsolete)])


def _is_same(file: Path, uploaded: RepoFile) -> bool:
    """Whether the Hub's file has the same bytes. The Hub has git's digest of files that are not in LFS."""
    if file.stat().st_size != uploaded.size:
        return False
    if uploaded.lfs is not None:
        return sha256(file) == uploaded.lfs.sha256
    return hashlib.sha1(b"blob %d\0" % uploaded.size + file.read_bytes()).hexdigest() == uploaded.blob_id


def _commit(hub: HfApi, repo: str, change: _Change, title: str, *, pull_request: bool = False, url: str = "") -> Pushed:
    page = f"{hub.endpoint}/{repo}/tree/{change.revision}"
    if not change.operations:
        return Pushed(change.revision, change.head, url or page, is_new=False)
    commit = hub.create_commit(
        repo,
        change.operations,
        commit_message=title,
        revision=change.revision,
        create_pr=pull_request,
        # If somebody else has committed meanwhile, this commit fails: the files of two models must not mix.
        parent_commit=change.head,
    )
    return Pushed(commit.pr_revision or change.revision, commit.oid, url or commit.pr_url or page, is_new=True)


@contextlib.contextmanager
def explain_write_errors(repo: str, revision: str) -> Iterator[None]:
    """Raises UserError with the next step instead of the errors of the Hub's clients in the block."""
    try:
        yield
    except Exception as error:
        # The clients wrap the error of an upload in a RuntimeError.
        cause = error.__cause__ if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception) else error
        problem = _explain(cause, repo, revision)
        if problem is None:
            raise
        raise problem from error


def _explain(error: Exception, repo: str, revision: str) -> UserError | None:
    from httpx2 import HTTPError
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status, reason = error.response.status_code if isinstance(error, HfHubHTTPError) else None, _describe_cause(error)
    if isinstance(error, HFValidationError):
        return UserError.of("hub", "release.hub.repo", f"{repo!r} is not a name on the Hub: write owner/name.")
    if isinstance(error, RevisionNotFoundError):
        return UserError.of(
            "hub",
            "release.hub.revision",
            f"{repo!r} has no revision {revision!r}, and it cannot be created: name a branch.",
        )
    if isinstance(error, ValueError) and "README.md" in str(error):
        reasons = "; ".join(line.removeprefix("- ") for line in str(error).splitlines()[1:])
        return UserError.of(
            "hub",
            "release.hub.license",
            f"the Hub refuses the model card ({reasons}): correct release.hub.license or tags.",
        )
    if status in (401, 403) or isinstance(error, RepositoryNotFoundError):
        message = f"the Hub does not let this access token write to {repo!r} ({reason}): set HF_TOKEN to one that may"
        return UserError.of("hub", "release.hub.repo", f"{message}, or name another repository.")
    if status in (409, 412):
        message = f"somebody else wrote to {repo!r} at the same time ({reason}): try again."
        return UserError.of(NETWORK, "release.hub.repo", message)
    if status is not None and 400 <= status < 500 and status not in (408, 429):
        return UserError.of("hub", "release.hub.repo", f"the Hub refuses the files for {repo!r} ({reason}).")
    of_this_machine = isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)
    # A JSONDecodeError means that a gateway answered instead of the Hub.
    if not isinstance(error, HTTPError | OSError | JSONDecodeError) or of_this_machine:
        return None
    step = "unset HF_HUB_OFFLINE" if is_offline_mode() else "check the network"
    if server_fault(error):
        step = "the fault is the Hub's, so run the same command again later"
    message = f"writing to {repo!r} on the Hub failed ({reason}): {step}; files that arrived are not sent again."
    return UserError.of(NETWORK, "release.hub.repo", message)


def _describe_cause(error: Exception) -> str:
    return re.sub(r"(?<=\w)\?\S+", "", find_cause(error))  # without queries of URLs, which may contain a signature
