"""The Hugging Face Hub as a run needs it: look-ups, downloads of models, messages for errors, and checks and settings
of publishing."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.cache.history import History
from tasks.cache.results import PinnedCommit
from tasks.environment_variables import ACCESS_TOKENS, HUB, passed
from tasks.home import without_credentials
from training.jobs.protocol import Settings
from training.models.repository_files import MODEL_FILES, POOLING, TOKENIZER_FILES, name_of, part_of, require_files
from training.problems import NETWORK, Problem, UserError, server_error
from training.recipe import Recipe

METADATA_TIMEOUT_S = 10.0
EVAL_RESULTS = ".eval_results/finetune.yaml"
"""The path of this project's evaluation results in a model's repository; other files of the folder are the user's."""

Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class Found:
    """The commit of a revision."""

    pin: PinnedCommit
    files: tuple[str, ...] | None = None
    """Paths in the repository; None if unknown."""
    reachable: bool = True
    """False if the Hub did not answer and this is the commit of the last run."""


def look_up(kind: Kind, path: str, revision: str | None, history: History) -> Found:
    """Looks up the present commit of a revision. A revision that is a commit needs no request.

    If the Hub cannot be reached, returns the commit of the last run that used this repository and revision.
    Raises UserError for a repository or revision that is missing, gated or private.
    """
    revision = revision or "main"
    name = f"{path}@{revision}"
    if re.fullmatch("[0-9a-f]{40}", revision):
        return Found(PinnedCommit(name=name, commit=revision))
    from huggingface_hub import HfApi

    hub = HfApi()
    get_info = hub.model_info if kind == "model" else hub.dataset_info
    try:
        with explain_read_errors(kind, path, revision):
            info = get_info(path, revision=revision, timeout=METADATA_TIMEOUT_S)
            if info.gated:
                # Everybody may read the metadata of a gated repository, but not its files.
                hub.auth_check(path, repo_type=kind)
    except UserError as error:
        last = history.last_commit(kind, name)
        if last is None or any(problem.kind != NETWORK for problem in error.problems):
            raise
        return Found(last, reachable=False)
    files = tuple(file.rfilename for file in info.siblings or ())
    return Found(PinnedCommit(name=name, commit=str(info.sha)), files)


def repository_url(kind: Kind, path: str) -> str:
    """Returns the address of a repository's page on the Hub that HF_ENDPOINT names."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return f"{without_credentials(endpoint).rstrip('/')}/{'datasets/' if kind == 'dataset' else ''}{path}"


class PublishSettings(Settings):
    """Settings of tasks.hub.push."""

    repo: str
    revision: str
    private: bool
    """Whether a new repository is private."""
    pull_request: bool
    title: str
    """Title of the commit or pull request."""
    files: dict[str, str]
    """Local files by their paths in the repository."""


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
        yield from build_token_error(hub.repo).problems
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


def build_token_error(repo: str) -> UserError:
    return UserError.of(
        "hub", "release.hub.repo", f"{repo!r} cannot be written without an access token: set HF_TOKEN to one that may."
    )


@contextlib.contextmanager
def explain_read_errors(kind: Kind, path: str, revision: str) -> Iterator[None]:
    """Raises UserError with the next step instead of the errors of the Hub's clients in the block."""
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
        raise UserError.of("hub", f"{part}.path", message) from error
    except RepositoryNotFoundError as error:
        message = (
            f"the Hub has no {kind} {path!r}, or it is private: check the name, and set HF_TOKEN if it is private."
        )
        raise UserError.of("hub", f"{part}.path", message) from error
    except RevisionNotFoundError as error:
        message = f"{path!r} has no revision {revision!r}: name a branch, a tag or a commit."
        raise UserError.of("hub", f"{part}.revision", message) from error
    except HFValidationError as error:
        raise UserError.of("hub", f"{part}.path", f"{path!r} is not a name on the Hub: write owner/name.") from error
    except (HTTPError, OSError, CachedRepoTreeNotFoundError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise  # an error of this machine, such as a full disk: errors of the clients have no errno
        raise _explain_no_answer(f"{part}.path", path, revision, error) from error


def _explain_no_answer(where: str, path: str, revision: str, error: Exception) -> UserError:
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        message = f"this access token may not read {path!r} on the Hub: set HF_TOKEN to one that may."
        return UserError.of("hub", where, message)
    step = "unset HF_HUB_OFFLINE" if is_offline_mode() else "check the network"
    step += ", then run the same command again."
    if where.startswith("model."):
        step += " Without the Hub, model.source: folder takes a model on this machine, and model.source: scratch "
        step += "trains a small one from nothing, for trying."
    if fault := server_error(error):
        error, step = fault, "the fault is the Hub's. Run the same command again later."
    return UserError.of(
        NETWORK, where, f"the Hub cannot be asked for {path!r} at {revision!r} ({find_cause(error)}): {step}"
    )


def find_cause(error: BaseException) -> str:
    """Returns the first error of a chain in one line, without passwords. The clients' later errors only add advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return without_credentials(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": "))


def download_model(name: str, commit: str) -> dict[str, Path]:
    """The files of a commit in the cache of the Hub's clients, by their names in a snapshot."""
    from huggingface_hub import get_cached_repo_tree, hf_hub_download, snapshot_download

    with explain_read_errors("model", name, commit):
        wanted = [*MODEL_FILES, *TOKENIZER_FILES]
        folder = snapshot_download(name, revision=commit, allow_patterns=wanted, ignore_patterns="*/*")
        # Another program may have left a part of the commit in the cache: the stored listing names all files.
        paths = [file.path for file in get_cached_repo_tree(name, revision=commit)]
        pooling = fnmatch.filter(paths, POOLING)
        nested = {name_of(path): Path(hf_hub_download(name, path, revision=commit)) for path in pooling}
    files = {path: Path(folder, path) for path in paths if "/" not in path and part_of(path)}
    require_files(files, f"{name!r} at {commit[:12]}")
    return files | nested
