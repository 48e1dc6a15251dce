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

import contextlib
import json
import os
import pwd
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator
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
_UNMAPPED_USER = 65534
"""Owner of the folders of the host in a container without root: no process of the container has this user."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("127.0.0.1", "localhost", "::1")

# The bars of the Hub's clients are for a person who waits, not for a log.
WITHOUT_TERMINAL = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def prepare_environment() -> None:
    """Sets the variables that prefect, mlflow and huggingface_hub read on import, unless the user has set them."""
    for name, value in (ENVIRONMENT if sys.stderr.isatty() else ENVIRONMENT | WITHOUT_TERMINAL).items():
        os.environ.setdefault(name, value)
    if any(os.environ.get(name) for proxy in PROXIES for name in (proxy, proxy.upper())):
        # Clients of the servers here would send their requests, and the password, to the proxy.
        for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
            hosts = [host.strip() for host in (os.environ.get(name) or os.environ.get(other) or "").split(",")]
            os.environ[name] = ",".join(dict.fromkeys(filter(None, [*hosts, *LOOPBACK])))
    if not os.environ.get("HOME"):
        with contextlib.suppress(KeyError):  # a user id without an entry, as containers may have
            os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir


def find_environment_problems() -> list[Problem]:
    """Problems of the variables that would end libraries with a traceback, whatever they are used for, and of files in
    the working directory that libraries would read as settings."""
    problems = list(_find_foreign_settings())
    if not os.environ.get("HOME"):
        message = f"is not set, and user {os.getuid()} has no home folder: set it to a folder that you may write to."
        problems.append(Problem(kind="environment", where="HOME", message=message))
    certificates = os.environ.get("SSL_CERT_FILE")
    if certificates and not _has_certificates(Path(certificates)):
        message = f"{certificates} is no file with certificates: name one, or unset the variable."
        problems.append(Problem(kind="environment", where="SSL_CERT_FILE", message=message))
    return problems


def _find_foreign_settings() -> Iterator[Problem]:
    """Prefect takes settings from files of the working directory, which may have come with rows: they name a server for
    passwords and rows, and code that configures logging."""
    readers: dict[str, tuple[str, Callable[[bytes], bool]]] = {
        ".env": ("Prefect", lambda text: bool(re.search(rb"(?im)^[\s'\"]*(?:export\s+)?['\"]?prefect_", text))),
        "prefect.toml": ("Prefect", lambda text: bool(text.strip())),
        "pyproject.toml": ("Prefect", _has_prefect_table),
        "matplotlibrc": ("matplotlib", lambda text: os.stat("matplotlibrc").st_uid not in (os.getuid(), 0)),
    }
    for name, (library, has_settings) in readers.items():
        try:
            status = os.stat(name)
            if stat.S_ISDIR(status.st_mode):  # a virtual environment may be in .env
                continue
            if stat.S_ISREG(status.st_mode) and not has_settings(Path(name).read_bytes()):
                continue
        except OSError:  # there is none, or nobody can read it
            continue
        message = f"{library} would take settings from this file in the working directory, which may have come with "
        message += "rows or a model. Set them in the environment or in a profile (`prefect config set`), and remove "
        message += "them here, or call finetune in another folder."
        yield Problem(kind="environment", where=name, message=message)


def _has_prefect_table(text: bytes) -> bool:
    try:
        return "prefect" in tomllib.loads(text.decode()).get("tool", {})
    except ValueError:  # Prefect ignores it too
        return False


def _has_certificates(file: Path) -> bool:
    try:
        return b"-----BEGIN" in file.read_bytes()
    except OSError:
        return False


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
    """The absolute path of the home folder, created with mode 0700 if missing. One of this user's gets this mode.

    Raises UserError if other users may write to it or to a folder above it, because Prefect's records in it can execute
    code.
    """
    folder = home_path()
    require_usable_path(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UserError([_home_problem(f"{folder} cannot be used: {error.strerror}. Name another folder")]) from error
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (os.getuid(), 0):
        message = f"{folder} may be written by others, and what it holds is trusted: chmod 700 it, or name another"
        raise UserError([_home_problem(message)])
    if foreign := _find_replaceable(folder):
        message = f"{foreign} belongs to another user or may be written by others, who could put another folder in the "
        raise UserError([_home_problem(f"{message}place of {folder}: change its mode, or name another")])
    if status.st_mode & 0o077 and status.st_uid == os.getuid():  # passwords and rows are private
        folder.chmod(0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        remedy = "its file system is read-only: name" if read_only else "change its mode, or name"
        raise UserError([_home_problem(f"{folder} cannot be written to: {remedy} another folder")])
    return folder


def require_usable_path(folder: Path) -> None:
    """Raises UserError if libraries would take a part of the home's path for a part of a URL."""
    if found := re.search(r"\?|%[0-9a-fA-F]{2}", str(folder)):
        message = f"{folder} contains {found[0]!r}, which paths in URLs of databases cannot have: name another folder"
        raise UserError([_home_problem(message)])


def _find_replaceable(folder: Path) -> Path | None:
    """The first folder above in which another user could rename the home; None if there is none. In a folder with the
    sticky bit, such as /tmp, only owners rename."""
    for above in dict.fromkeys([*folder.parents, *folder.resolve().parents]):
        status = above.stat()
        others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != os.getgid() else 0)  # one's own group is private
        if status.st_uid not in (os.getuid(), 0, _UNMAPPED_USER) or (
            status.st_mode & others and not status.st_mode & stat.S_ISVTX
        ):
            return above
    return None


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
