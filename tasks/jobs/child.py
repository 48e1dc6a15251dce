"""Runs a stage's child program: started or resumed under the stage's key, its output linked into the artifact."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cache.stage import Work
from tasks.jobs.batch_memory import Fits
from tasks.jobs.launch import LAUNCH, require_finished, run_job
from training.jobs.protocol import CHECKPOINTS, EVENTS, LOGS, OUTPUT, Failure, Job, Outcome, Settings, finished_output

# Killed from outside, or hanging: what helped before is to go on from the last checkpoint.
TRIED_AGAIN = ("interrupted", "lost_rank", "stalled", "not_started")
TRIES = 3
DEFAULT_STALL_TIMEOUT_S = 600.0


def run_child(
    work: Work,
    program: str,
    argv: Sequence[str],
    *,
    settings: Settings | Mapping[str, Any],
    inputs: Mapping[str, Path],
    env: Mapping[str, str] | None = None,
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    fits: Fits | None = None,
    before_try: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs the program to its end, fills `work.out` with its output and its log, and returns its figures.

    A program that can divide its batches is given `fits`, and finds `micro_batch_divisor` in its settings: when
    memory runs out, it resumes with smaller ones. `before_try` is called once the job's folder says what is to be run.
    Raises UserError for the user's mistakes and launch.JobFailed for everything else.
    """
    job = work.job
    if any((job / CHECKPOINTS).glob("checkpoint-*")) or finished_output(job):
        work.state = "resumed"
    if fits:
        _begin_where_it_was(job, fits)
        if fits.division > 1:
            note = f"{fits.rows} rows at a time: more did not fit here before (forget that: remove {fits.file})"
            work.on_events([{"kind": "note", "message": note}])
    written = settings.model_dump(mode="json") if isinstance(settings, Settings) else dict(settings)
    places = {name: str(path) for name, path in inputs.items()}
    told, tries = 0, TRIES
    while True:
        if fits:
            written["micro_batch_divisor"] = fits.division
        Job(program=program, key=work.key, settings=written, inputs=places).write(job)
        if finished_output(job) is None:
            before_try()
        follow = _Follower(work, skip=told)
        outcome = run_job(job, argv, env=env or {}, on_events=follow, stall_timeout_s=stall_timeout_s)
        if outcome.failure is None:
            break
        tries -= outcome.failure.kind in TRIED_AGAIN
        again = _next_try(outcome.failure, fits, tries)
        if again is None:
            require_finished(_advised(outcome))
        told = follow.seen
        cause = outcome.failure.message.splitlines()[0].removesuffix(".")
        work.on_events([{"kind": "warning", "message": f"{cause}. {again}"}])
        work.state = "resumed"
    if fits and fits.division > 1:
        fits.remember()
    _bring_home(job, work.out)
    return dict(outcome.figures)


def _begin_where_it_was(job: Path, fits: Fits) -> None:
    """A job that goes on does so with the batches it had, whatever other work has learnt since."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        fits.division = int(Job.read(job).settings["micro_batch_divisor"])


def _next_try(failure: Failure, fits: Fits | None, tries_left: int) -> str | None:
    """What is done about a failure, for the user; None where nothing is."""
    if failure.kind == "out_of_memory" and fits is not None and fits.halve():
        return f"Going on with at most {fits.rows} rows at a time."
    if failure.kind in TRIED_AGAIN and tries_left > 0:
        return "Trying again."
    return None


def _advised(outcome: Outcome) -> Outcome:
    failure = outcome.failure
    if failure is None or failure.kind != "out_of_memory":
        return outcome
    advice = "Smaller batches do not help: lower tokens.max_length, or choose a smaller model."
    return outcome.model_copy(update={"failure": failure.model_copy(update={"message": f"{failure.message} {advice}"})})


class _Follower:
    """Hands a job's events on. Each try reads them from the first: those that were told are skipped."""

    def __init__(self, work: Work, skip: int) -> None:
        self._work = work
        self._skip = skip
        self.seen = 0

    def __call__(self, events: list[dict[str, Any]]) -> None:
        fresh = events[max(0, self._skip - self.seen) :]
        self.seen += len(events)
        if fresh:
            self._work.on_events(fresh)


def _bring_home(job: Path, out: Path) -> None:
    _bring(job / OUTPUT, out)
    log = out / "log"
    log.mkdir(exist_ok=True)
    for name in (EVENTS, LAUNCH):
        if (job / name).is_file():
            shutil.copyfile(job / name, log / name)
    for printed in sorted((job / LOGS).glob("*.log")):
        shutil.copyfile(printed, log / printed.name)


def _bring(source: Path, target: Path) -> None:
    """Links the job's output into the artifact: the job stays whole until the artifact is published."""

    def link(src: str, dst: str) -> None:
        try:
            os.link(src, dst)
        except OSError:  # a file system without hard links
            shutil.copyfile(src, dst)

    shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)
