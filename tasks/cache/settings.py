"""The home folder, the servers' addresses, and the environment of every command and child program.

| variable | meaning | default |
|---|---|---|
| FINETUNE_HOME | the store, jobs, locks, and the default tracking database | `.finetune` in the working directory |
| MLFLOW_TRACKING_URI | where runs and models are tracked | `sqlite:///<home>/mlflow.db` |
| FINETUNE_STORE | artifacts that machines share: `s3://bucket/prefix`, or `file:///folder` | none |
| FINETUNE_SWEEPS | the database of all studies of sweeps, a URL of SQLAlchemy | a journal for each, in the home |
| PREFECT_API_URL | the Prefect server | `finetune up`, the active profile, or one for the run |
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path

from training.problems import Problem, UserError

ENVIRONMENT = {
    # Nothing about a user's runs leaves the machine unasked.
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # Without a bar per file between the lines of the stages.
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Prefect would otherwise start its own server, which has no password.
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "true",
}

ACCESS_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""The variables in which the Hub's clients look for an access token first."""

SWEEPS = "FINETUNE_SWEEPS"

# The bars of the Hub's clients are for a person who waits, not for a log.
WITHOUT_TERMINAL = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def prepare_environment() -> None:
    """Sets the variables that prefect, mlflow and huggingface_hub read on import, unless the user has set them."""
    for name, value in (ENVIRONMENT if sys.stderr.isatty() else ENVIRONMENT | WITHOUT_TERMINAL).items():
        os.environ.setdefault(name, value)


_fixed: ContextVar[tuple[Path, str | None] | None] = ContextVar("fixed", default=None)
"""The home and the tracking URI of a thread that must not follow later changes."""


def with_this_home(target: Callable[[], None]) -> Callable[[], None]:
    """A target for a thread that keeps the present home and tracking server, because it may outlive changes of the
    environment and the working directory."""
    context = copy_context()
    context.run(_fixed.set, (home_path(), os.environ.get("MLFLOW_TRACKING_URI")))
    return partial(context.run, target)


def home_path() -> Path:
    """The absolute path of the home folder, which may not exist yet."""
    if fixed := _fixed.get():
        return fixed[0]
    return Path(os.environ.get("FINETUNE_HOME") or ".finetune").absolute()


def home() -> Path:
    """The absolute path of the home folder, created with mode 0700 if missing.

    Raises UserError if other users may write to it, because Prefect's records in it can execute code.
    """
    folder = home_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UserError([_home_problem(f"{folder} cannot be used: {error.strerror}. Name another folder")]) from error
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (os.getuid(), 0):
        message = f"{folder} may be written by others, and what it holds is trusted: chmod 700 it, or name another"
        raise UserError([_home_problem(message)])
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError([_home_problem(f"{folder} cannot be written to: change its mode, or name another folder")])
    return folder


def _home_problem(message: str) -> Problem:
    return Problem(kind="home", where="FINETUNE_HOME", message=message)


def tracking_uri() -> str:
    """MLflow's tracking and registry URI."""
    return _named_tracking_uri() or f"sqlite:///{home() / 'mlflow.db'}"


def _named_tracking_uri() -> str | None:
    fixed = _fixed.get()
    return fixed[1] if fixed else os.environ.get("MLFLOW_TRACKING_URI")


def without_credentials(text: str) -> str:
    """The text without the user names and passwords of the URLs in it."""
    # A database's password may hold slashes; a number and a slash are a port and a path.
    return re.sub(r"(?<=://)([^/@\s]+|[^/:@\s]*:(?!\d+/)[^@\s]+)@", "", text)


def mlflow_artifacts() -> Path:
    """The folder of MLflow's files if the tracking database is the home folder's own."""
    return home() / "mlartifacts"


def tracking_is_local() -> bool:
    """Whether the tracking database is the home folder's own."""
    return not _named_tracking_uri()


def registry_place() -> str:
    """The registry as an input of actions. The home's own registry has one name, wherever the home is, and also through
    the server of `finetune up`."""
    return "home" if tracking_is_local() or tracking_uri() == _served() else without_credentials(tracking_uri())


def _served() -> str | None:
    """The address of the home's own tracking database, as `finetune up` serves it."""
    try:
        state = json.loads((home() / "services" / "state.json").read_bytes())
    except (OSError, ValueError):
        return None
    return str(state.get("mlflow"))
