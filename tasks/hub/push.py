"""Push of files to a branch on the Hugging Face Hub, in one commit; unchanged files make no commit.

As a program, it publishes a model. Only child programs, which have the access token, import it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    Discussion,
    HfApi,
    get_token,
    is_offline_mode,
    set_client_factory,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import default_client_factory

from tasks.hub.client import EVAL_RESULTS, PublishSettings, build_token_error, find_cause
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job, sha256
from training.models.repository_files import part_of
from training.problems import NETWORK, UserError, server_error

TIMEOUT_S = 300.0
"""Read time-out, which the clients lack by default; the server may take minutes for a large commit."""


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Pushes the model, and returns its repo, revision, commit and url.

    Weights, tokenizer files and evaluation results in the repository that this model does not have are removed: they
    belong to an earlier model.
    """
    settings = PublishSettings.model_validate(job.settings)
    pushed = push(
        connect(settings.repo),
        Branch(settings.repo, settings.revision, settings.private),
        {path: Path(file) for path, file in settings.files.items()},
        title=settings.title,
        replaced=lambda path: path == EVAL_RESULTS or ("/" not in path and part_of(path) is not None),
        pull_request=settings.pull_request,
    )
    if not pushed.is_new:
        events.note(f"{settings.repo} has this model already: nothing to commit")
    return {"repo": settings.repo, "revision": pushed.revision, "commit": pushed.commit, "url": pushed.url}


@dataclass(frozen=True)
class Branch:
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


def connect(repo: str) -> HfApi:
    """Creates a client that may write. Call this only in a child program: it changes the clients of the whole process.
    Raises UserError without an access token."""
    set_client_factory(_create_client)
    if get_token() is None:
        raise build_token_error(repo)
    return HfApi()


def _create_client() -> httpx2.Client:
    client = default_client_factory()
    client.timeout = TIMEOUT_S
    return client


def push(
    hub: HfApi,
    branch: Branch,
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
    with explain_write_errors(branch.repo, branch.revision):
        _create_branch(hub, branch)
        change = _find_change(hub, branch.repo, branch.revision, files, replaced)
        if pull_request and change.operations:
            for other in _list_pull_requests(hub, branch.repo):
                if other.title == title:
                    change = _find_change(hub, branch.repo, str(other.git_reference), files, replaced)
                    return _commit(hub, branch.repo, change, title, url=other.url)
        return _commit(hub, branch.repo, change, title, pull_request=pull_request)


def _list_pull_requests(hub: HfApi, repo: str) -> list[Discussion]:
    try:
        return list(hub.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open"))
    except HfHubHTTPError as error:
        if error.response.status_code != 404:
            raise
        message = f"{repo!r} takes no pull requests ({_describe_cause(error)}): turn them on in its settings"
        message += ", or set this to false."
        raise UserError.of("hub", "release.hub.pull_request", message) from error


def _create_branch(hub: HfApi, branch: Branch) -> None:
    try:
        refs = hub.list_repo_refs(branch.repo)
    except RepositoryNotFoundError:
        hub.create_repo(branch.repo, private=branch.private, exist_ok=True)
        refs = hub.list_repo_refs(branch.repo)
    if branch.revision not in {one.name for one in refs.branches}:
        hub.create_branch(branch.repo, branch=branch.revision, exist_ok=True)


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
    if not isinstance(error, httpx2.HTTPError | OSError | JSONDecodeError) or of_this_machine:
        return None
    step = "unset HF_HUB_OFFLINE" if is_offline_mode() else "check the network"
    if server_error(error):
        step = "the fault is the Hub's, so run the same command again later"
    message = f"writing to {repo!r} on the Hub failed ({reason}): {step}; files that arrived are not sent again."
    return UserError.of(NETWORK, "release.hub.repo", message)


def _describe_cause(error: Exception) -> str:
    return re.sub(r"(?<=\w)\?\S+", "", find_cause(error))  # without queries of URLs, which may contain a signature


if __name__ == "__main__":
    run_program(main)
