"""Launching jobs: `run_job` follows a job to its end, wherever an engine (tasks/jobs/engines) runs it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.jobs.engines.engine import Runner
from tasks.jobs.engines.local import LOCAL, STOP_GRACE_S
from tasks.locks import raise_if_cancelled
from training.jobs.protocol import (
    EVENTS,
    Event,
    Failure,
    FailureKind,
    Outcome,
    crash_files,
    finished_output,
    last_lines,
    read_events,
    read_outcome,
)
from training.problems import UserError, full_disk

STALLED_GRACE_S = 5.0
KILLED_WITHIN_S = 60.0
"""A process that Linux killed for want of memory longer before the end of a job is not the cause of this end."""
LOG_LINES = 20
"""The end of the log that a failure's message shows."""


class JobFailed(Exception):
    """A job ended without its result, and not because of the user's mistake."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)

    def __reduce__(self) -> tuple[type[JobFailed], tuple[Failure]]:
        # Exception's own pickling would pass the message to __init__.
        return type(self), (self.failure,)


def require_finished(outcome: Outcome) -> Outcome:
    """The outcome of a finished job. Raises UserError with the problems, or JobFailed."""
    if outcome.failure is None:
        return outcome
    if outcome.failure.kind == "user_error":
        raise UserError(outcome.failure.problems)
    raise JobFailed(outcome.failure)


class EventReader:
    """Reads the events of a job, of all its tries, and passes each on once."""

    def __init__(self, path: Path, on_events: Callable[[list[Event]], None]) -> None:
        self._path = path
        self._on_events = on_events
        self._offset = 0
        self.starts = 0
        """How often the program has started."""

    def read(self) -> bool:
        """Passes new events on; returns whether there were any."""
        events, self._offset = read_events(self._path, self._offset)
        if events:
            self.starts += sum(event["kind"] == "started" for event in events)
            self._on_events(events)
        return bool(events)


def run_job(
    job: Path,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_events: Callable[[list[Event]], None] = lambda events: None,
    events: EventReader | None = None,
    stall_timeout_s: float,
    poll_s: float = 0.2,
    runner: Runner[Any] = LOCAL,
) -> Outcome:
    """Runs the job to its end and returns its outcome; a job that has finished before is not run again.

    `on_events` gets every event once, those of earlier tries first; a caller that runs the job again passes `events`
    instead. A job without new events for `stall_timeout_s` is stopped. Any exception, such as a cancellation or an
    error of `on_events`, stops the job before it is raised.
    """
    reader = events or EventReader(job / EVENTS, on_events)
    looks = follow_job(job, argv, env=env, events=reader, stall_timeout_s=stall_timeout_s, poll_s=poll_s, runner=runner)
    while True:
        try:
            next(looks)
        except StopIteration as ended:
            outcome: Outcome = ended.value
            return outcome


def follow_job(
    job: Path,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    events: EventReader,
    stall_timeout_s: float,
    poll_s: float = 0.2,
    runner: Runner[Any] = LOCAL,
) -> Generator[None, None, Outcome]:
    """Runs the job as `run_job` does, and yields after each look at its events, at least every `poll_s` seconds.
    Closing the generator stops the job."""
    events.read()
    if (earlier := finished_output(job)) is not None:
        return earlier
    raise_if_cancelled()
    starts_before, kills, killed_at = events.starts, runner.killed_for_memory(), -math.inf
    handle, stalled, last_event = runner.start(job, argv, env or {}), False, time.monotonic()
    try:
        while runner.poll(handle) and not stalled:
            runner.wait(handle, poll_s)
            raise_if_cancelled()
            if events.read():
                last_event = time.monotonic()
            if (now := runner.killed_for_memory()) != kills:
                kills, killed_at = now, time.monotonic()
            yield
            stalled = time.monotonic() - last_event > stall_timeout_s
    except BaseException:
        runner.stop(handle, STOP_GRACE_S)
        raise
    if stalled:
        runner.stop(handle, STALLED_GRACE_S)
    events.read()
    reported = read_outcome(job)
    kind = reported.failure.kind if reported and reported.failure else None
    killed_by_system = runner.killed_for_memory() != kills or time.monotonic() - killed_at < KILLED_WITHIN_S
    # These failures are consequences: a process that lost another one, or that this function or the launcher stopped.
    consequences = {"lost_rank", *(["interrupted"] if stalled or killed_by_system else [])}
    if reported is not None and kind not in consequences:
        return reported
    if stalled:
        message = f"No sign of life for {stall_timeout_s:g} s (compute.stall_timeout_s), so the job was stopped."
        return _build_failure("stalled", message, runner.logs(handle))
    ended = _explain_end(job, runner.logs(handle), events.starts > starts_before, killed_by_system)
    if ended.failure and ended.failure.kind == "out_of_memory" and not kills.own:
        return ended.model_copy(update={"failure": ended.failure.model_copy(update={"proven": False})})
    return ended


def _explain_end(job: Path, log: Path, began: bool, killed_by_system: bool) -> Outcome:
    """The failure of a job without an outcome. Its exit code does not help: accelerate's is always 1."""
    if full := full_disk(job):  # no outcome could be written
        failure = Failure(kind="user_error", message=str(full), problems=full.problems)
        return Outcome(state="failed", failure=failure)
    if not began:
        return _build_failure("not_started", "The program ended before it began its work.", log)
    if killed_by_system:
        return _build_failure("out_of_memory", "The system ran out of memory and killed the program.", log)
    crashes = [file.read_text(errors="replace") for file in crash_files(job)]
    several = len(crashes) > 1
    for traceback in crashes:
        # One of several processes may abort because it lost another.
        if traceback and not (several and "Aborted" in traceback):
            return _build_failure("internal", "The program crashed in native code.", log, traceback)
    killed = "One of the processes" if several else "The program"
    message = f"{killed} was killed (the system also does so when memory runs out)."
    return _build_failure("lost_rank" if several else "interrupted", message, log)


def _build_failure(kind: FailureKind, message: str, log: Path, traceback: str = "") -> Outcome:
    lines = last_lines(log, LOG_LINES)
    text = "\n".join([message, f"The end of {log}:", *lines]) if lines else message
    return Outcome(state="failed", failure=Failure(kind=kind, message=text, traceback=traceback))
