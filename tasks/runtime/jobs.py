"""A stage's work in a child program: started or continued under the stage's key, its output brought home."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.runtime.launch import require_finished, run_job
from tasks.runtime.stage import Work
from training.protocol import CHECKPOINTS, EVENTS, LOGS, OUTPUT, Job, Outcome, finished_output

# Killed from outside, or hanging: what helped before is to go on from the last checkpoint.
TRIED_AGAIN = ("interrupted", "lost_rank", "stalled")
TRIES = 3
DEFAULT_STALL_TIMEOUT_S = 600.0


def run_child(
    work: Work,
    program: str,
    argv: Sequence[str],
    *,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Path],
    env: Mapping[str, str] | None = None,
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
) -> dict[str, Any]:
    """Runs the program to its end, fills `work.out` with its output and its log, and returns its figures.

    Raises UserError for the user's mistakes and launch.JobFailed for everything else.
    """
    job = work.job
    if any((job / CHECKPOINTS).glob("checkpoint-*")) or finished_output(job):
        work.state = "resumed"
    Job(
        program=program,
        key=work.key,
        settings=dict(settings),
        inputs={name: str(path) for name, path in inputs.items()},
    ).write(job)
    outcome = _run(work, job, argv, env or {}, stall_timeout_s)
    _bring(job / OUTPUT, work.out)
    log = work.out / "log"
    log.mkdir(exist_ok=True)
    if (job / EVENTS).is_file():
        shutil.copyfile(job / EVENTS, log / EVENTS)
    for printed in sorted((job / LOGS).glob("*.log")):
        shutil.copyfile(printed, log / printed.name)
    return dict(outcome.figures)


def _run(work: Work, job: Path, argv: Sequence[str], env: Mapping[str, str], stall_timeout_s: float) -> Outcome:
    told = 0
    for remaining in reversed(range(TRIES)):
        follow = _Follower(work, skip=told)
        outcome = run_job(job, argv, env=env, on_events=follow, stall_timeout_s=stall_timeout_s)
        failure = outcome.failure
        if failure is None or failure.kind not in TRIED_AGAIN or not remaining:
            break
        told = follow.seen
        work.on_events([{"kind": "warning", "message": f"{failure.message.splitlines()[0]} Trying again."}])
        work.state = "resumed"
    return require_finished(outcome)


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


def _bring(source: Path, target: Path) -> None:
    """Links the job's output into the artifact: the job stays whole until the artifact is published."""

    def link(src: str, dst: str) -> None:
        try:
            os.link(src, dst)
        except OSError:  # a file system without hard links
            shutil.copyfile(src, dst)

    shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)
