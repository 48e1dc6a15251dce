"""Pushes files to a branch on the Hugging Face Hub in one commit, or in none if nothing changed."""

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

from tasks.cache.settings import ACCESS_TOKENS
from tasks.hub.client import why
from training.jobs.protocol import sha256
from training.problems import NETWORK, Problem, UserError, server_fault
from training.recipe import Recipe

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import Discussion, HfApi
    from huggingface_hub.hf_api import RepoFile

SILENT_S = 300.0
"""The clients have no read time-out of their own; the server may take minutes for a large commit."""


@dataclass(frozen=True)
class Place:
    """A branch of a model's repository, and what to do where it is missing."""

    repo: str
    revision: str
    private: bool
    """Whether a repository that is made is private."""


@dataclass(frozen=True)
class Pushed:
    """The state of a branch, or a pull request, after a push."""

    revision: str
    """The branch, or `refs/pr/N`."""
    commit: str
    url: str
    made: bool
    """Whether there was anything to commit."""


def environment() -> dict[str, str]:
    """The variables of a child program that writes to the Hub: online, with the access token, which no other gets."""
    given = {name: os.environ[name] for name in ACCESS_TOKENS if name in os.environ}
    offline = os.environ.get("HF_HUB_OFFLINE", "0")
    # Their warnings name addresses with signatures in them.
    return {**given, "HF_HUB_OFFLINE": offline, "HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def publishing_problems(recipe: Recipe) -> Iterator[Problem]:
    """What is to be known of a recipe that publishes, before anything is trained: an error where it cannot, and a
    warning where it does so uncompared. The Hub is not asked."""
    hub = recipe.release.hub
    if hub is None:
        return
    # Where a CI job's identity is changed for a token, there is none until the network is asked.
    if not os.environ.get("HF_OIDC_RESOURCE") and not _has_token():
        yield from _no_token(hub.repo).problems
    if recipe.release.registry is None:
        message = (
            "there is no champion to compare with, so every model that keeps to release.gate's bounds is published: "
            "set release.registry, for only those that are better."
        )
        yield Problem(kind="release", where="release.hub", message=message, level="warning")


def _has_token() -> bool:
    """Whether one is set, or was kept by a login. huggingface_hub's own look may renew it over the network."""
    from huggingface_hub.constants import HF_TOKEN_PATH

    kept = Path(HF_TOKEN_PATH)
    return any(os.environ.get(name, "").strip() for name in ACCESS_TOKENS) or (
        kept.is_file() and bool(kept.read_text().strip())
    )


def connected(repo: str) -> HfApi:
    """A client with an access token, for a program of its own. Raises UserError where there is no token."""
    from huggingface_hub import HfApi, get_token, set_client_factory

    set_client_factory(_patient_client)
    if get_token() is None:
        raise _no_token(repo)
    return HfApi()


def _no_token(repo: str) -> UserError:
    return _problem("repo", f"{repo!r} cannot be written without an access token: set HF_TOKEN to one that may.")


def _patient_client() -> httpx2.Client:
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = SILENT_S
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
    """Has the branch hold these files, by their paths in the repository.

    Files of the repository whose path is `replaced` by them go in the same commit; all others stay. The repository
    and the branch are made where missing. With `pull_request`, one is opened in place of a commit, or found again by
    its title. Nothing is sent that the Hub has, and unchanged files make no commit.
    Raises UserError with the next step where the Hub does not answer, or refuses.
    """
    with told(place.repo, place.revision):
        _make_place(hub, place)
        now = _look(hub, place.repo, place.revision, files, replaced)
        if pull_request and now.operations:
            for other in _pull_requests(hub, place.repo):
                if other.title == title:
                    ours = _look(hub, place.repo, str(other.git_reference), files, replaced)
                    return _commit(hub, place.repo, ours, title, url=other.url)
        return _commit(hub, place.repo, now, title, pull_request=pull_request)


def _pull_requests(hub: HfApi, repo: str) -> list[Discussion]:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return list(hub.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open"))
    except HfHubHTTPError as error:
        if error.response.status_code != 404:
            raise
        message = (
            f"{repo!r} takes no pull requests ({_reason(error)}): turn them on in its settings, or set this to false."
        )
        raise _problem("pull_request", message) from error


def _make_place(hub: HfApi, place: Place) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        refs = hub.list_repo_refs(place.repo)
    except RepositoryNotFoundError:
        hub.create_repo(place.repo, private=place.private, exist_ok=True)
        refs = hub.list_repo_refs(place.repo)
    if place.revision not in {branch.name for branch in refs.branches}:
        hub.create_branch(place.repo, branch=place.revision, exist_ok=True)


@dataclass(frozen=True)
class _Difference:
    revision: str
    head: str
    operations: list[Any]
    """What the clients call them: a file that is new or other, or one that goes."""


def _look(
    hub: HfApi, repo: str, revision: str, files: Mapping[str, Path], replaced: Callable[[str], bool]
) -> _Difference:
    """What is to be done to a revision, by the Hub's own digests."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.hf_api import RepoFile

    head = str(hub.model_info(repo, revision=revision).sha)
    listed = hub.list_repo_tree(repo, recursive=True, revision=head)
    there = {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}
    gone = [path for path in there if path not in files and replaced(path)]
    changed = [path for path, file in files.items() if path not in there or not _same(file, there[path])]
    additions = [CommitOperationAdd(path, files[path]) for path in changed]
    return _Difference(revision, head, [*additions, *map(CommitOperationDelete, gone)])


def _same(file: Path, there: RepoFile) -> bool:
    """Whether the Hub's file has these bytes; what is not in LFS is known by its name in git."""
    if file.stat().st_size != there.size:
        return False
    if there.lfs is not None:
        return sha256(file) == there.lfs.sha256
    return hashlib.sha1(b"blob %d\0" % there.size + file.read_bytes()).hexdigest() == there.blob_id


def _commit(
    hub: HfApi, repo: str, what: _Difference, title: str, *, pull_request: bool = False, url: str = ""
) -> Pushed:
    if not what.operations:
        return Pushed(what.revision, what.head, url or f"{hub.endpoint}/{repo}/tree/{what.revision}", made=False)
    made = hub.create_commit(
        repo,
        what.operations,
        commit_message=title,
        revision=what.revision,
        create_pr=pull_request,
        # Whoever commits in between makes this one fail: together they might be no model at all.
        parent_commit=what.head,
    )
    url = url or made.pr_url or f"{hub.endpoint}/{repo}/tree/{what.revision}"
    return Pushed(made.pr_revision or what.revision, made.oid, url, made=True)


@contextlib.contextmanager
def told(repo: str, revision: str) -> Iterator[None]:
    """Makes one UserError, with the next step, of whatever the clients of the Hub raise when they write."""
    try:
        yield
    except Exception as error:
        # A file that did not get through is told as a RuntimeError of that.
        cause = error.__cause__ if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception) else error
        problem = _told(cause, repo, revision)
        if problem is None:
            raise
        raise problem from error


def _told(error: Exception, repo: str, revision: str) -> UserError | None:
    from httpx2 import HTTPError
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status, reason = error.response.status_code if isinstance(error, HfHubHTTPError) else None, _reason(error)
    if isinstance(error, HFValidationError):
        return _problem("repo", f"{repo!r} is not a name of the Hub's: write owner/name.")
    if isinstance(error, RevisionNotFoundError):
        return _problem("revision", f"{repo!r} has no revision {revision!r}, and it cannot be made: name a branch.")
    if isinstance(error, ValueError) and "README.md" in str(error):
        said = "; ".join(line.removeprefix("- ") for line in str(error).splitlines()[1:])
        return _problem("license", f"the Hub refuses the model card ({said}): mend release.hub.license or its tags.")
    if status in (401, 403) or isinstance(error, RepositoryNotFoundError):
        message = f"the Hub does not let this access token write to {repo!r} ({reason}): set HF_TOKEN to one that may"
        return _problem("repo", f"{message}, or name another repository.")
    if status in (409, 412):
        message = f"somebody else wrote to {repo!r} at the same time ({reason}): try again."
        return _problem("repo", message, NETWORK)
    if status is not None and 400 <= status < 500 and status not in (408, 429):
        return _problem("repo", f"the Hub refuses what is sent to {repo!r} ({reason}).")
    of_this_machine = isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)
    # An answer in place of the Hub's, of a gateway say, is no JSON.
    if not isinstance(error, HTTPError | OSError | JSONDecodeError) or of_this_machine:
        return None
    mend = "unset HF_HUB_OFFLINE" if is_offline_mode() else "check the network"
    if server_fault(error):
        mend = "the fault is the Hub's, so run the same command again later"
    message = f"writing to {repo!r} on the Hub failed ({reason}): {mend}; what has arrived is not sent again."
    return _problem("repo", message, NETWORK)


def _reason(error: Exception) -> str:
    return re.sub(r"(?<=\w)\?\S+", "", why(error))  # an address may hold a signature


def _problem(field: str, message: str, kind: str = "hub") -> UserError:
    return UserError([Problem(kind=kind, where=f"release.hub.{field}", message=message)])
