"""How soon a training that was killed makes its first new step."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.jobs.engines.local import LOCAL, Handle
from tests.benchmarks.subject import Subject, training_argv, training_environment
from tests.benchmarks.table import Row
from training.jobs.processes import descendants, send
from training.jobs.protocol import EVENTS, read_events

ROUNDS = 3
BUDGETS_S = {1: 10.0, 2: 12.0}
GIVEN_UP_S = 300.0


def measure(subject: Subject) -> list[Row]:
    """Seconds from the supervisor's start, for each number of processes that a recipe may ask for."""
    rows = []
    for processes in BUDGETS_S:
        seconds = [_back_s(subject, processes, place) for place in range(ROUNDS)]
        rows.append(
            Row(
                f"first new step after a kill, {processes} process{'es' * (processes > 1)}",
                statistics.median(seconds),
                "from the supervisor's start to the first progress beyond the checkpoint, which is reported once "
                f"a second; median of {ROUNDS}, {min(seconds):.1f} to {max(seconds):.1f} s",
                unit="s",
                most=BUDGETS_S[processes],
            )
        )
    return rows


def _back_s(subject: Subject, processes: int, place: int) -> float:
    """Starts a training, kills its whole tree after the first checkpoint, and starts it again."""
    job = subject.training_job(
        f"kill-{processes}-{place}",
        num_processes=processes,
        num_train_epochs=100,
        eval_strategy="no",
        load_best_model_at_end=False,
        checkpoint_interval_s=2.0,
    )
    argv, env = training_argv(num_processes=processes), training_environment(processes)
    handle = LOCAL.start(job, argv, env)
    saved, _ = _wait(handle, 0, lambda event: event["kind"] == "checkpoint")
    for pid in [handle.pid, *descendants(handle.pid)]:
        send(pid, signal.SIGKILL)
    while LOCAL.poll(handle):
        time.sleep(0.01)
    _, offset = read_events(Path(handle.job) / EVENTS, 0)
    began = time.time()
    handle = LOCAL.start(job, argv, env)
    back, _ = _wait(handle, offset, lambda event: event["kind"] == "progress" and event["done"] > saved["step"])
    LOCAL.stop(handle, 0.0)
    return float(back["time"] - began)


def _wait(handle: Handle, offset: int, wanted: Callable[[dict[str, Any]], bool]) -> tuple[dict[str, Any], int]:
    """The first event of this kind behind `offset`. Raises RuntimeError where the job ends without it."""
    until = time.monotonic() + GIVEN_UP_S
    while LOCAL.poll(handle) and time.monotonic() < until:
        events, offset = read_events(Path(handle.job) / EVENTS, offset)
        for event in filter(wanted, events):
            return event, offset
        time.sleep(0.02)
    LOCAL.stop(handle, 0.0)
    raise RuntimeError(LOCAL.logs(handle).read_text()[-4000:])
