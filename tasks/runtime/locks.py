"""One lock a name, by `flock`: held by a process, gone with it, waited for by the others.

A lock file that is removed while somebody waits for it would let two holders in, so the files stay: they are empty
and there is one a key.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WAIT_S = 0.05


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
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


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
        descriptor = os.open(self._file(key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not self._wait(key, descriptor, acquire_timeout):
            os.close(descriptor)
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
        os.close(self._held.pop(key)[1])

    def is_locked(self, key: str) -> bool:
        """Whether anybody, here or in another process, holds it."""
        return key in self._held or not self.wait_for_lock(key, timeout=0)

    def is_lock_holder(self, key: str, holder: str) -> bool:
        """Whether this holder holds it."""
        return key in self._held and self._held[key][0] == holder

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """Waits until nobody holds it; False where `timeout` seconds were not enough."""
        descriptor = os.open(self._file(key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return self._wait(key, descriptor, timeout)
        finally:
            os.close(descriptor)

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """As `wait_for_lock`."""
        return self.wait_for_lock(key, timeout)

    def _wait(self, key: str, descriptor: int, timeout: float | None) -> bool:
        ends = None if timeout is None else time.monotonic() + timeout
        told = False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if ends is not None and time.monotonic() >= ends:
                return False
            if not told and self._on_wait:
                self._on_wait(key)
            told = True
            time.sleep(WAIT_S)

    def _file(self, key: str) -> Path:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder / (key.replace("/", "-") + ".lock")
