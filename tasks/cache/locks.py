"""One lock a name, by `flock`: held by a process, gone with it, waited for by the others.

The holder deletes the lock file when it releases the lock, so files do not pile up. A process that waited then holds a
lock on a deleted file; it notices that the name leads elsewhere, and opens the file anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WAIT_S = 0.05
NOTE_AFTER_S = 5.0


def held(file: Path) -> bool:
    """Whether any process holds the lock that is this file; it is not made where it is missing."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def shared(file: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the lock that is this file together with all who share it; waits, after `on_wait`, while somebody has it
    alone."""
    descriptor = _open(file)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        while not _is_file(descriptor, file):
            os.close(descriptor)
            descriptor = _open(file)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusively(file: Path, wait_s: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Whether this caller alone holds the lock that is this file, until the block ends; False if others hold it for
    `wait_s` seconds. `on_wait` is called once after some seconds."""
    began, noted, descriptor = time.monotonic(), False, _open(file)
    try:
        while not (mine := _try_lock(descriptor) and _is_file(descriptor, file)):
            waited = time.monotonic() - began
            if waited >= wait_s:
                break
            if waited >= NOTE_AFTER_S and not noted:
                noted = True
                on_wait()
            time.sleep(WAIT_S)
            os.close(descriptor)
            descriptor = _open(file)
        yield mine
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FlockManager:
    """Prefect's `LockManager` over `flock`; that is a protocol, so nothing of Prefect is imported here.

    Args:
        folder: where the lock files lie.
        on_wait: called once with the key when another process holds it.
    """

    def __init__(self, folder: Path, on_wait: Callable[[str], None] | None = None) -> None:
        self._folder = folder
        self._on_wait = on_wait
        self._held: dict[str, tuple[str, int]] = {}  # key -> holder, file descriptor

    def acquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """Waits for the lock; False where `acquire_timeout` seconds were not enough. `hold_timeout` is not offered."""
        if self.is_lock_holder(key, holder):
            return True
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = self._locked(key, acquire_timeout)
        if descriptor is None:
            return False
        self._held[key] = (holder, descriptor)
        return True

    async def aacquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """As `acquire_lock`."""
        return self.acquire_lock(key, holder, acquire_timeout, hold_timeout)

    def release_lock(self, key: str, holder: str) -> None:
        """Lets the next one in. Raises ValueError where this holder does not hold it."""
        if not self.is_lock_holder(key, holder):
            raise ValueError(f"{holder} does not hold the lock of {key}")
        descriptor = self._held.pop(key)[1]
        with contextlib.suppress(OSError):  # a folder that is gone, or read-only by now
            self._file(key).unlink()
        os.close(descriptor)

    def is_locked(self, key: str) -> bool:
        """Whether anybody, here or in another process, holds it."""
        return key in self._held or not self.wait_for_lock(key, timeout=0)

    def is_lock_holder(self, key: str, holder: str) -> bool:
        """Whether this holder holds it."""
        return key in self._held and self._held[key][0] == holder

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """Waits until nobody holds it; False where `timeout` seconds were not enough."""
        if not self._file(key).exists():
            return True
        descriptor = self._locked(key, timeout)
        if descriptor is None:
            return False
        os.close(descriptor)
        return True

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """As `wait_for_lock`."""
        return self.wait_for_lock(key, timeout)

    def _locked(self, key: str, timeout: float | None) -> int | None:
        """The descriptor of the lock's file, locked; None where `timeout` seconds were not enough."""
        ends = None if timeout is None else time.monotonic() + timeout
        file, waits = self._file(key), False
        while True:
            descriptor = _open(file)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file(descriptor, file):
                    return descriptor
                os.close(descriptor)
                continue
            os.close(descriptor)
            if ends is not None and time.monotonic() >= ends:
                return None
            if not waits and self._on_wait:
                self._on_wait(key)
            waits = True
            time.sleep(WAIT_S)

    def _file(self, key: str) -> Path:
        return self._folder / (key.replace("/", "-") + ".lock")


def _open(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_file(descriptor: int, file: Path) -> bool:
    """Whether the descriptor is of what the name leads to now."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
