"""One holder a name, across processes; a dead holder holds nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from prefect.locking.protocol import LockManager

from tasks import locks
from tasks.locks import FlockManager, exclusive_lock, shared_lock

HOLDER = """
import sys, time
from pathlib import Path
from tasks.locks import FlockManager
FlockManager(Path(sys.argv[1])).acquire_lock("fit/abc/record", "other")
print("held", flush=True)
time.sleep(60)
"""


def test_prefect_takes_it_for_a_lock_manager(tmp_path: Path) -> None:
    assert isinstance(FlockManager(tmp_path), LockManager)


def test_a_second_holder_waits_until_the_first_releases(tmp_path: Path) -> None:
    locks = FlockManager(tmp_path)
    assert locks.acquire_lock("a/b", "one")
    assert not FlockManager(tmp_path).acquire_lock("a/b", "two", acquire_timeout=0.1)
    assert locks.is_locked("a/b") and locks.is_lock_holder("a/b", "one") and not locks.is_lock_holder("a/b", "two")
    locks.release_lock("a/b", "one")
    assert FlockManager(tmp_path).acquire_lock("a/b", "two", acquire_timeout=0)


def test_only_the_holder_releases(tmp_path: Path) -> None:
    locks = FlockManager(tmp_path)
    locks.acquire_lock("a", "one")
    with pytest.raises(ValueError, match="two"):
        locks.release_lock("a", "two")


def test_a_killed_holder_lets_the_waiting_one_in_at_once(tmp_path: Path) -> None:
    waited: list[str] = []
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        locks = FlockManager(tmp_path, on_wait=waited.append)
        assert not locks.acquire_lock("fit/abc/record", "me", acquire_timeout=0.2)
        holder.send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert locks.acquire_lock("fit/abc/record", "me", acquire_timeout=10)
        assert time.monotonic() - began < 5
        assert waited[0] == "fit/abc/record"
    finally:
        holder.kill()
        holder.wait()


def test_released_lock_leaves_no_file(tmp_path: Path) -> None:
    locks = FlockManager(tmp_path)
    locks.acquire_lock("a/b", "one")
    locks.release_lock("a/b", "one")
    assert not locks.is_locked("a/b") and locks.wait_for_lock("a/b")
    assert list(tmp_path.iterdir()) == []


def test_lock_of_a_deleted_file_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a waiter's look at the file and its lock, the holder releases, and another process comes first."""
    first, second, waiter = FlockManager(tmp_path), FlockManager(tmp_path), FlockManager(tmp_path)
    assert first.acquire_lock("a", "first")
    open_file = locks._open

    def open_slowly(file: Path) -> int:
        descriptor = open_file(file)
        monkeypatch.setattr(locks, "_open", open_file)
        first.release_lock("a", "first")
        assert second.acquire_lock("a", "second")
        return descriptor

    monkeypatch.setattr(locks, "_open", open_slowly)
    assert not waiter.acquire_lock("a", "waiter", acquire_timeout=0)


def test_shared_holders_and_a_lone_one_keep_each_other_out(tmp_path: Path) -> None:
    alone, waited = FlockManager(tmp_path), threading.Event()
    assert alone.acquire_lock("home", "lone")
    entered, leave = threading.Event(), threading.Event()

    def share() -> None:
        with shared_lock(tmp_path / "home.lock", waited.set):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=share)
    thread.start()
    assert waited.wait(60) and not entered.is_set()
    alone.release_lock("home", "lone")
    assert entered.wait(60)
    assert not alone.acquire_lock("home", "lone", acquire_timeout=0)
    leave.set()
    thread.join()
    assert alone.acquire_lock("home", "lone", acquire_timeout=0)


@pytest.mark.parametrize("hold", [shared_lock, partial(exclusive_lock, wait_s=5)])
def test_a_lock_file_that_was_removed_and_cannot_be_made_again_is_named_by_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Callable[[Path], AbstractContextManager[object]]
) -> None:
    opened = list[int]()

    def open_once(file: Path) -> int:
        if opened:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        opened.append(os.open(file, os.O_RDWR | os.O_CREAT))
        file.unlink()
        return opened[0]

    monkeypatch.setattr(locks, "_open", open_once)
    with pytest.raises(OSError, match="No space left"), hold(tmp_path / "a.lock"):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
