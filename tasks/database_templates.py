"""Empty databases of Prefect and MLflow: their migrations take seconds, so a new home gets a copy of an earlier result.

    ~/.cache/finetune/databases/<name>-sqlite-<version>.db    below XDG_CACHE_HOME if it is set

The name contains the version of the server whose migrations ran. A template has tables and no one's data: it is made
aside, before any server uses the database.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from training.jobs.protocol import fsync


def create_database(file: Path, name: str, migrate: Callable[[Path], None]) -> None:
    """Creates a database with all of its tables or not at all: a partial migration cannot always be completed.

    The caller holds a lock on `file`.

    Args:
        file: the database, which does not exist.
        name: the server and its version, such as `prefect-3.9.1`.
        migrate: makes an empty database with all tables at the path.
    """
    new = file.with_name(f".{file.name}-new")
    for leftover in file.parent.glob(f"{new.name}*"):  # of a process that was killed, with its journal
        leftover.unlink()
    template = _folder() / f"{name}-sqlite-{sqlite3.sqlite_version}.db"
    try:
        _copy(template, new)
    except (OSError, sqlite3.Error):  # missing, or unusable
        new.unlink(missing_ok=True)
        migrate(new)
        with contextlib.closing(sqlite3.connect(new)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # a journal of its own would not be renamed
        with contextlib.suppress(OSError, sqlite3.Error):  # another user's cache, a full disk
            _keep(new, template)
    new.rename(file)
    fsync(file.parent)


def _keep(database: Path, template: Path) -> None:
    template.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=template.parent) as folder:
        aside = Path(folder) / template.name
        _copy(database, aside)
        aside.rename(template)


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if Path(caches).is_absolute() else Path.home() / ".cache") / "finetune" / "databases"


def _copy(source: Path, target: Path) -> None:
    """Copies a database with what is only in its journal yet. Raises OSError for a file that another user may have
    written, and sqlite3.Error for a damaged one."""
    for path in (source.parent, source):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} may be written by others")
    with (
        contextlib.closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as old,
        contextlib.closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
        new.execute("PRAGMA journal_mode = DELETE")  # in WAL mode, even a reader makes further files
        if new.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError(f"{source} is damaged")
    fsync(target)
