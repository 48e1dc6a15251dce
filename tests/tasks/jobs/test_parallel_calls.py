"""Calls at once: how many, with which GPUs, and how they are stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tasks.jobs import parallel_calls
from tasks.jobs.commands import python_argv
from tasks.jobs.hardware import assigned_gpus
from tasks.jobs.launch import run_job
from tasks.jobs.parallel_calls import ParallelCalls
from tasks.locks import FlockManager, cancelled
from training.jobs.protocol import EVENTS, Job, read_events


def test_no_more_items_run_at_once_than_the_count_and_each_has_gpus_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_calls, "visible_gpus", lambda: ["0", "1", "2", "3"])
    turn, running, most, seen = threading.Lock(), 0, 0, []

    def call(item: int) -> Sequence[str] | None:
        nonlocal running, most
        with turn:
            running += 1
            most = max(most, running)
            seen.append(assigned_gpus.get())
        time.sleep(0.05)
        with turn:
            running -= 1
        return assigned_gpus.get()

    at_once, waiting, results = ParallelCalls(2, call), list(range(6)), {}
    while waiting or at_once.busy:
        while waiting and at_once.free:
            at_once.start(waiting.pop(0))
        results |= dict(at_once.wait())
    assert sorted(results) == list(range(6)) and most == 2
    assert {tuple(gpus or ()) for gpus in results.values()} == {("0", "2"), ("1", "3")}
    assert assigned_gpus.get() is None


def test_the_error_of_an_item_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: ParallelCalls[int, float] = ParallelCalls(2, lambda item: 1 / item)
    at_once.start(0)
    with pytest.raises(ZeroDivisionError):
        list(at_once.wait())


def test_jobs_of_all_items_are_stopped_together(home: Path, tmp_path: Path) -> None:
    """The main thread alone receives Ctrl-C; jobs are waited for in others."""

    def call(number: int) -> None:
        job = tmp_path / str(number)
        Job(program="tests.tasks.jobs.sleeping", key=str(number), settings={}).write(job)
        run_job(job, python_argv("tests.tasks.jobs.sleeping"), stall_timeout_s=60)

    at_once: ParallelCalls[int, None] = ParallelCalls(2, call)
    with pytest.raises(RuntimeError, match="an error of the block"), at_once:
        at_once.start(1)
        at_once.start(2)
        deadline = time.monotonic() + 60
        while not all(read_events(tmp_path / str(number) / EVENTS, 0)[0] for number in (1, 2)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        began = time.monotonic()
        raise RuntimeError("an error of the block")
    assert time.monotonic() - began < 15
    with pytest.raises(KeyboardInterrupt):
        list(at_once.wait())
    assert cancelled.get() is None


def test_an_item_that_waits_for_the_lock_of_another_run_is_stopped_with_the_others(tmp_path: Path) -> None:
    other = FlockManager(tmp_path)
    other.acquire_lock("fit/k", "another run")

    def call(number: int) -> None:
        FlockManager(tmp_path, cancellable=True).acquire_lock("fit/k", str(number))

    at_once: ParallelCalls[int, None] = ParallelCalls(2, call)
    with pytest.raises(RuntimeError, match="an error of the block"), at_once:
        at_once.start(1)
        began = time.monotonic()
        raise RuntimeError("an error of the block")
    assert time.monotonic() - began < 10
    with pytest.raises(KeyboardInterrupt):
        list(at_once.wait())


def test_an_item_that_hangs_does_not_keep_the_others_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_calls, "STOP_WITHIN_S", 0.2)
    released = threading.Event()
    at_once: ParallelCalls[int, bool] = ParallelCalls(2, lambda item: released.wait(60))
    with pytest.raises(RuntimeError, match="an error of the block"), at_once:
        at_once.start(1)
        at_once.start(2)
        began = time.monotonic()
        raise RuntimeError("an error of the block")
    assert time.monotonic() - began < 10
    released.set()
