"""A job's program from its first try to its end: what follows a failure, and batches that fit into memory.

If memory runs out, batches are halved: an optimizer step has the same rows in more and smaller passes. The division is
kept for the next work of this kind on the same hardware.

    <home>/memory/<digest>.json    the kind of work, and the divisor of its batches
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cache.digests import digest_of
from tasks.cache.results import Lock
from tasks.cache.stage import Work
from tasks.cache.store import link_or_copy
from tasks.home import home
from tasks.jobs.commands import LAUNCH
from tasks.jobs.engines.engine import Runner
from tasks.jobs.engines.local import LOCAL
from tasks.jobs.hardware import memory
from tasks.jobs.launch import EventReader, require_finished, run_job
from training.engine import checkpoints
from training.jobs import protocol
from training.jobs.protocol import (
    CHECKPOINTS,
    EVENTS,
    LOGS,
    OUTPUT,
    Failure,
    Message,
    Outcome,
    Settings,
    finished_output,
    sha256,
    write_atomically,
)

RETRIED = ("interrupted", "lost_rank", "stalled", "not_started")
"""Failures after which the program is started again, from its last checkpoint."""
TRIES = 3
"""Starts of a program that gets no further: a newer checkpoint allows as many again."""
DEFAULT_STALL_TIMEOUT_S = 600.0


class BatchDivision:
    """The batches of one kind of work on this machine, divided until they fit into memory.

    Args:
        rows: rows of the recipe's largest batch.
        model: the model's folder; its config.json determines its size.
        other: everything else that determines the memory; JSON values.
    """

    def __init__(self, rows: int, model: Path, **other: Any) -> None:
        self._rows = rows
        config = sha256(model / "config.json")
        self._work = {"rows": rows, "config": config, "hardware": memory(), **other}
        self.file = home() / "memory" / f"{digest_of(self._work)[:40]}.json"
        self.divisor = self.lasting = 1
        """The division now, and the one that the next work of this kind begins with."""
        with contextlib.suppress(OSError, ValueError, KeyError):  # the first work of this kind, or a damaged file
            self.divisor = self.lasting = int(json.loads(self.file.read_bytes())["division"])

    @property
    def rows(self) -> int:
        """Rows of the largest batch after the division."""
        return -(-self._rows // self.divisor)

    def halve(self, lasting: bool = True) -> bool:
        """Halves the batches, and if `lasting` also those of the next work of this kind. Returns False if they are
        single rows already."""
        if self.rows == 1:
            return False
        self.divisor *= 2
        if lasting:
            self.lasting = self.divisor
        return True

    def save(self) -> None:
        """Makes the next work of this kind begin with the lasting division."""
        if self.lasting == 1:
            return
        self.file.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(self.file, json.dumps({**self._work, "division": self.lasting}, indent=1).encode())


def divide_batches(program: str, rows: int, max_length: int, lock: Lock) -> Callable[[Path], BatchDivision]:
    """Returns a function from a model's folder to the division of the batches of a program that only computes its
    outputs."""
    return lambda model: BatchDivision(
        rows,
        model,
        program=program,
        max_length=max_length,
        mixed_precision=lock.mixed_precision,
        num_processes=lock.num_processes,
    )


def run_child(
    work: Work,
    program: str,
    argv: Sequence[str],
    *,
    settings: Settings | Mapping[str, Any],
    inputs: Mapping[str, Path],
    env: Mapping[str, str] | None = None,
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    batches: BatchDivision | None = None,
    before_try: Callable[[], None] = lambda: None,
    runner: Runner[Any] = LOCAL,
) -> Any:
    """Runs the program to its end, fills `work.out` with its output and its log, and returns its result as
    JSON values.

    A program that can divide its batches gets `batches`, and finds `micro_batch_divisor` in its settings: if memory
    runs out, it resumes with smaller batches. `before_try` is called after job.json is written. `runner` runs it.
    Raises UserError for the user's mistakes and launch.JobFailed for all other failures.
    """
    job = work.job
    if any((job / CHECKPOINTS).glob("checkpoint-*")) or finished_output(job):
        work.state = "resumed"
    if batches:
        with contextlib.suppress(OSError, ValueError, KeyError):
            # A resumed job keeps its division, whatever other work of this kind has found since.
            batches.divisor = int(protocol.Job.read(job).settings["micro_batch_divisor"])
        if batches.divisor > 1:
            note = f"{batches.rows} rows at a time: more did not fit into memory before"
            note += f" (to try: rm {batches.file})" if batches.lasting > 1 else ""
            work.note(note)
    values = settings.model_dump(mode="json") if isinstance(settings, Settings) else dict(settings)
    places = {name: str(path) for name, path in inputs.items()}
    events, tries, reached = EventReader(job / EVENTS, work.on_events), TRIES, _newest_step(job)
    while True:
        if batches:
            values["micro_batch_divisor"] = batches.divisor
        protocol.Job(program=program, key=work.key, settings=values, inputs=places).write(job)
        if finished_output(job) is None:
            before_try()
        outcome = run_job(job, argv, env=env or {}, events=events, stall_timeout_s=stall_timeout_s, runner=runner)
        if (failure := outcome.failure) is None:
            break
        if (step := _newest_step(job)) > reached:
            tries, reached = TRIES, step
        tries -= failure.kind in RETRIED
        work.on_events([prepare_next_try(outcome, failure, tries, batches)])
        work.state = "resumed"
    if batches:
        batches.save()
    _link_output(job, work.out)
    return outcome.result


def _newest_step(job: Path) -> int:
    """The steps that the job's newest whole checkpoint has, on this machine; 0 without one."""
    manifests = (job / CHECKPOINTS).glob(f"checkpoint-*/{checkpoints.MANIFEST}")
    return max((checkpoints.step_of(manifest.parent) for manifest in manifests), default=0)


def prepare_next_try(outcome: Outcome, failure: Failure, tries: int, batches: BatchDivision | None) -> Message:
    """Halves the batches if memory ran out. Returns the warning that names the failure and the next step.

    `tries` is how often the program may still be started again. Raises UserError or launch.JobFailed if another try
    would not help.
    """
    if failure.kind == "out_of_memory" and batches is not None and batches.halve(lasting=failure.proven):
        next_step = f"Continuing with at most {batches.rows} rows at a time."
    elif failure.kind in RETRIED and tries > 0:
        next_step = "Trying again."
    else:
        if failure.kind == "out_of_memory":
            advice = "Smaller batches do not help: lower tokens.max_length, or choose a smaller model."
            failure = failure.model_copy(update={"message": f"{failure.message} {advice}"})
        require_finished(outcome.model_copy(update={"failure": failure}))
    cause = failure.message.splitlines()[0].removesuffix(".")
    return {"kind": "warning", "message": f"{cause}. {next_step}"}


def _link_output(job: Path, out: Path) -> None:
    """Links the job's output into the artifact's folder: the job stays complete until the artifact is published."""
    shutil.copytree(job / OUTPUT, out, copy_function=link_or_copy, dirs_exist_ok=True)
    log = out / "log"
    log.mkdir(exist_ok=True)
    for file in (job / EVENTS, job / LAUNCH, *sorted((job / LOGS).glob("*.log"))):
        if file.is_file():
            shutil.copyfile(file, log / file.name)
