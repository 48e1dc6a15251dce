"""Named locks by `flock`: the kernel releases them when their process ends.

The holder deletes the lock file when it releases the lock, so files do not pile up. A process that waited then holds a
lock on a deleted file: it compares the file with the path, and opens the path again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

WAIT_S = 0.05
NOTE_AFTER_S = 5.0

cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)
"""Set to interrupt the jobs and the waits of this thread: only the main thread receives signals."""


def raise_if_cancelled() -> None:
    """Raises KeyboardInterrupt if this thread is cancelled. Each wait for another process, machine or job calls it."""
    if (stop := cancelled.get()) is not None and stop.is_set():
        raise KeyboardInterrupt


def is_held(file: Path) -> bool:
    """Whether any process holds the lock of this file, which may be missing."""
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
def shared_lock(file: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds a shared lock of the file. Calls `on_wait` and waits while a process holds the exclusive lock."""
    descriptor = _open(file)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        while not _is_file(descriptor, file):
            descriptor = _open_again(file, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_lock(file: Path, wait_s: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Holds the exclusive lock of the file and yields True; yields False if another process holds it for `wait_s`
    seconds. Calls `on_wait` once after some seconds."""
    started, on_wait_called, descriptor = time.monotonic(), False, _open(file)
    try:
        while not (locked := _try_lock(descriptor) and _is_file(descriptor, file)):
            waited_s = time.monotonic() - started
            if waited_s >= wait_s:
                break
            if waited_s >= NOTE_AFTER_S and not on_wait_called:
                on_wait_called = True
                on_wait()
            time.sleep(WAIT_S)
            descriptor = _open_again(file, descriptor)
        yield locked
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FlockManager:
    """Prefect's `LockManager` by `flock`. It is a protocol, so this module does not import Prefect.

    Args:
        folder: of the lock files.
        on_wait: called once with the key if another process holds the lock.
        cancellable: whether the wait for a lock ends when this thread is cancelled.
    """

    def __init__(
        self, folder: Path, on_wait: Callable[[str], None] | None = None, *, cancellable: bool = False
    ) -> None:
        self._folder = folder
        self._on_wait = on_wait
        self._cancellable = cancellable
        self._held: dict[str, tuple[str, int]] = {}  # key -> holder, file descriptor

    def acquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """Waits for the lock; False after `acquire_timeout` seconds. `hold_timeout` is ignored."""
        if self.is_lock_holder(key, holder):
            return True
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = self._lock(key, acquire_timeout)
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
        """Raises ValueError if this holder does not hold the lock."""
        if not self.is_lock_holder(key, holder):
            raise ValueError(f"{holder} does not hold the lock of {key}")
        descriptor = self._held.pop(key)[1]
        with contextlib.suppress(OSError):  # the folder was removed or is read-only
            self._file(key).unlink()
        os.close(descriptor)

    def is_locked(self, key: str) -> bool:
        """Whether this or another process holds the lock."""
        return key in self._held or not self.wait_for_lock(key, timeout=0)

    def is_lock_holder(self, key: str, holder: str) -> bool:
        """Whether this holder holds the lock."""
        return key in self._held and self._held[key][0] == holder

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """Waits until the lock is free; False after `timeout` seconds."""
        if not self._file(key).exists():
            return True
        descriptor = self._lock(key, timeout)
        if descriptor is None:
            return False
        os.close(descriptor)
        return True

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """As `wait_for_lock`."""
        return self.wait_for_lock(key, timeout)

    def _lock(self, key: str, timeout: float | None) -> int | None:
        """The locked descriptor of the lock's file; None after `timeout` seconds."""
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
            if self._cancellable:
                raise_if_cancelled()
            time.sleep(WAIT_S)

    def _file(self, key: str) -> Path:
        return self._folder / (key.replace("/", "-") + ".lock")


def _open(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _open_again(file: Path, descriptor: int) -> int:
    """Opens the file and closes the descriptor, in this order: the caller closes it if the file cannot be opened."""
    opened = _open(file)
    os.close(descriptor)
    return opened


def _is_file(descriptor: int, file: Path) -> bool:
    """Whether the descriptor and the path are the same file."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
