"""Digests of files, cached by inode or URL so that an unchanged file is not read twice.

A cached digest is used only if device, inode, size, mtime and ctime are unchanged. The kernel sets
ctime, so an edit that restores size and mtime is still noticed; a moved folder keeps its inodes and its digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from training.local_files import open_regular

# A file changed this shortly before it is read may change again within the same clock tick without a new
# timestamp; its digest is not cached.
SETTLED_S = 0.05
_KEEP = "INSERT OR REPLACE INTO digests VALUES (?,?,?)"
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def digest_of(value: Any) -> str:
    """sha256 of a JSON value, hex; the same for equal values in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Digests:
    """sha256 of files, cached in `<home>/digests.db`. Losing the cache costs only time."""

    def __init__(self, home: Path) -> None:
        self._database = home / "digests.db"

    def of(self, path: Path) -> str:
        """The sha256 of the file's bytes, hex. Raises OSError if it cannot be read."""
        return self.of_many([path])[0]

    def of_many(self, paths: list[Path]) -> list[str]:
        """One digest a path, in order."""
        with self._memory() as memory:
            return [self._digest(path, memory) for path in paths]

    def keep_many(self, digests: Mapping[Path, str]) -> None:
        """Caches the digests of files that were hashed while they were written, but of those written just now."""
        states = [(path.stat(), digest) for path, digest in digests.items()]
        rows = [(*_identity(status), digest) for status, digest in states if _is_settled(status)]
        with self._memory() as memory:
            if memory is not None:
                with self._ignore_errors():
                    memory.execute("BEGIN")  # one transaction: each takes as long as a small file
                    memory.executemany(_KEEP, rows)
                    memory.execute("COMMIT")

    def recalled(self, file: str, state: str) -> str | None:
        """The cached digest of a URL in this state."""
        with self._memory() as memory:
            return self._recall(memory, (file, state))

    def remember(self, file: str, state: str, digest: str) -> None:
        """Caches the digest of a URL in this state."""
        with self._memory() as memory:
            self._keep(memory, (file, state), digest)

    def derived(self, path: Path, made_by: str, make: Callable[[Path], str]) -> str:
        """The result of `make(path)`, cached like a digest. `made_by` names the function and its version."""
        with self._memory() as memory:
            return self._get_or_make(path, memory, made_by, make)

    def _digest(self, path: Path, memory: sqlite3.Connection | None) -> str:
        return self._get_or_make(path, memory, "", _sha256)

    def _get_or_make(
        self, path: Path, memory: sqlite3.Connection | None, made_by: str, make: Callable[[Path], str]
    ) -> str:
        before = path.stat()
        file, state = _identity(before)
        known = self._recall(memory, (file + made_by, state))
        if known:
            return known
        made = make(path)
        if _is_settled(before) and _identity(path.stat()) == (file, state):
            self._keep(memory, (file + made_by, state), made)
        return made

    @contextlib.contextmanager
    def _memory(self) -> Iterator[sqlite3.Connection | None]:
        try:
            # Autocommit: a process that hashes gigabytes between two digests must not lock the others out.
            memory = sqlite3.connect(self._database, timeout=5, isolation_level=None)
        except sqlite3.Error:
            yield None
            return
        try:
            with self._ignore_errors():
                memory.execute("PRAGMA synchronous=OFF")
                memory.execute("CREATE TABLE IF NOT EXISTS digests (file TEXT PRIMARY KEY, state TEXT, sha256 TEXT)")
            yield memory
        finally:
            memory.close()

    @contextlib.contextmanager
    def _ignore_errors(self) -> Iterator[None]:
        """Ignores errors of the database. A damaged one is deleted, and the next call creates a new one."""
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:  # the low byte is the primary code
                for file in (self._database, self._database.with_name(f"{self._database.name}-journal")):
                    with contextlib.suppress(OSError):
                        file.unlink(missing_ok=True)

    def _recall(self, memory: sqlite3.Connection | None, identity: tuple[str, str]) -> str | None:
        if memory is not None:
            with self._ignore_errors():
                row = memory.execute("SELECT sha256 FROM digests WHERE file=? AND state=?", identity).fetchone()
                return row[0] if row else None
        return None

    def _keep(self, memory: sqlite3.Connection | None, identity: tuple[str, str], digest: str) -> None:
        if memory is not None:
            with self._ignore_errors():
                memory.execute(_KEEP, (*identity, digest))


def _sha256(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        error.filename = str(path)  # reading does not set it, and opening does
        raise


def _is_settled(status: os.stat_result) -> bool:
    return time.time_ns() - status.st_ctime_ns > SETTLED_S * 1e9


def _identity(status: os.stat_result) -> tuple[str, str]:
    """Keys of the file and of its state."""
    return (
        f"{status.st_dev}:{status.st_ino}",
        f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}",
    )
