"""The home folder: where it is, the tracking database and the secrets in it, and its named locks.

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
import errno
import getpass
import grp
import hashlib
import json
import os
import pwd
import re
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path

from tasks.locks import FlockManager
from training.jobs.protocol import fsync, write_atomically
from training.problems import Problem, UserError

SWEEPS = "FINETUNE_SWEEPS"
MARK = "made_by_user"
"""The file that proves that a command of this user made the home, or that the user has named it."""
_marked: set[tuple[str, int]] = set()
"""The homes whose proof this process has seen, by path and inode."""
_MOST_PARTS = 10_000
"""Of a path with its links."""
_UNMAPPED_USER = 65534
"""Owner of the folders of the host in a container without root: no process of the container has this user."""

_fixed: ContextVar[tuple[Path, str | None] | None] = ContextVar("fixed", default=None)
"""The home and the tracking URI of a thread that must not follow later changes. All code takes them from the
environment, as programs and libraries do, so no parameter reaches it."""


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

    Raises UserError if other users may write to it or to a folder above it, or if it may have come with their files,
    because Prefect's records in it can execute code.
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
    if foreign := find_replaceable(folder):
        message = f"{foreign} belongs to another user or may be written by others, who could put another folder in the "
        raise UserError([_home_problem(f"{message}place of {folder}: change its mode, or name another")])
    if status.st_mode & 0o077 and status.st_uid == os.getuid():  # passwords and rows are private
        folder.chmod(0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        remedy = "its file system is read-only: name" if read_only else "change its mode, or name"
        raise UserError([_home_problem(f"{folder} cannot be written to: {remedy} another folder")])
    if (str(folder), status.st_ino) not in _marked:
        _require_mark(folder)
        _marked.add((str(folder), status.st_ino))
    return folder


def _require_mark(folder: Path) -> None:
    """Marks a home that is new, or that the user has named. Raises UserError for another one without the mark of this
    user: an archive of rows that was unpacked in the working directory can hold a home, with runs for the worker."""
    mark = _proof()
    if mark is None:
        return
    # First the files, then the mark: another process may be making this home.
    is_new = all(file.name.startswith((MARK, f".{MARK}")) for file in folder.iterdir())
    with contextlib.suppress(OSError):
        if (folder / MARK).read_bytes() == mark:
            return
    if not (is_new or os.environ.get("FINETUNE_HOME")):
        message = (
            f"{folder} is there, and no command of yours has made it: it may have come with rows or an archive, and "
            "what it holds is trusted. If it is yours, name it once, --home .finetune; else remove it, or name another"
        )
        raise UserError([_home_problem(message)])
    with contextlib.suppress(OSError):
        write_atomically(folder / MARK, mark)


def _proof() -> bytes | None:
    """The content of MARK: a digest of a secret of the user, made at the first use; None if it cannot be stored."""
    states = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = (Path(states) if Path(states).is_absolute() else Path.home() / ".local" / "state") / "finetune"
        file = folder / "home.key"
        if not file.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as aside:  # its mode is 0600
                aside.write(secrets.token_bytes(32))
                aside.flush()
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.link(aside.name, file)
        return hashlib.sha256(file.read_bytes()).hexdigest().encode()
    except (OSError, RuntimeError):
        return None


def require_usable_path(folder: Path) -> None:
    """Raises UserError if libraries would take a part of the home's path for a part of a URL."""
    if found := re.search(r"\?|%[0-9a-fA-F]{2}", str(folder)):
        message = f"{folder} contains {found[0]!r}, which paths in URLs of databases cannot have: name another folder"
        raise UserError([_home_problem(message)])


def find_replaceable(folder: Path) -> Path | None:
    """The first folder or link on the way to a folder by which another user could put something else in its place; None
    if there is none. In a folder with the sticky bit, such as /tmp, only owners rename."""
    *above, _ = _way_to(folder)
    for place in above:
        status = place.lstat()
        is_open = not (status.st_mode & stat.S_ISVTX or stat.S_ISLNK(status.st_mode)) and _may_be_written(place, status)
        if status.st_uid not in (os.getuid(), 0, _UNMAPPED_USER) or is_open:
            return place
    return None


def _may_be_written(folder: Path, status: os.stat_result) -> bool:
    """Whether others may write to a folder, by its mode or by an access control list, whose users and groups have at
    most the rights that the mode shows as those of the group."""
    if status.st_mode & stat.S_IWOTH or not status.st_mode & stat.S_IWGRP:
        return bool(status.st_mode & stat.S_IWOTH)
    if not _is_private(status.st_gid):
        return True
    with contextlib.suppress(OSError):  # a file system without such lists
        return "system.posix_acl_access" in os.listxattr(folder)
    return False


def _is_private(group: int) -> bool:
    """Whether a group is this user's alone: the primary one, with the user's name, as most systems create it, and
    without other members. Group 0, and users and groups without an entry, are those of containers."""
    if group != os.getgid():
        return False
    with contextlib.suppress(KeyError):
        user, entry = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
        return group == 0 or (entry.gr_name == user and not {*entry.gr_mem} - {user})
    return True


def _way_to(path: Path) -> list[Path]:
    """The folders and the links that lead to an absolute path, and its real path."""
    parts, at, way = list(path.parts[:0:-1]), Path("/"), [Path("/")]
    while parts:
        if (part := parts.pop()) == "..":
            at = at.parent
            continue
        way.append(at / part)
        if not way[-1].is_symlink():
            at = way[-1]
            continue
        if len(way) > _MOST_PARTS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = way[-1].readlink()
        parts += [one for one in reversed(target.parts) if one != "/"]
        at = Path("/") if target.is_absolute() else at
    return way if way[-1] == at else [*way, at]


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


@contextlib.contextmanager
def named_lock(name: str) -> Iterator[None]:
    """Holds a lock of this name, shared by all threads and processes of this home, in the block."""
    locks = FlockManager(home() / "locks")
    holder = f"{os.getpid()}-{threading.get_ident()}"
    locks.acquire_lock(name, holder)
    try:
        yield
    finally:
        locks.release_lock(name, holder)


def create_secret(file: Path, content: bytes) -> Path:
    """Creates a file that only this user may read, if it is missing, or empty after a power cut. Returns the file."""
    with named_lock(file.name):
        if not file.exists() or not file.stat().st_size:
            aside = file.with_name(f".{file.name}-new")
            aside.unlink(missing_ok=True)  # left by a killed process
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            aside.rename(file)
            fsync(file.parent)
    return file


def ray_token() -> Path:
    """The file with the token of Ray clusters that this project starts; created if missing. Ray's own, in the user's
    home, would be readable for others, and would change which clusters the user starts."""
    return create_secret(home() / "ray.token", secrets.token_hex(32).encode())


def signing_key() -> Path:
    """The file with the key that signs this home's checkpoints; created if missing."""
    return create_secret(home() / "signing.key", secrets.token_bytes(32))


def find_user() -> str:
    """The name of this process's user, or else its number."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())
