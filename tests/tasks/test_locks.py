"""One holder a name, across processes; a dead holder holds nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.locking.protocol import LockManager

from tasks.runtime.locks import FlockManager

HOLDER = """
import sys, time
from pathlib import Path
from tasks.runtime.locks import FlockManager
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
