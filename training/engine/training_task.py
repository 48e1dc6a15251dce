"""The task of an engine, and the engines: transformers' Trainer, a plain loop over Accelerate, or a user's function.

An engine is a function `train(task) -> Trained`. Every process calls it once, with the model in float32 on the CPU
(with `training.lora.quantization` in 4 bits on its GPU). It trains the weights that require a gradient:

1. It initializes accelerate's state, which connects the processes, and then calls `task.begin()`, which returns the
   checkpoint to resume from, or None.
2. It trains `task.model` on `task.train` by `task.training`, the recipe's section of that name. Settings that it does
   not read have no effect.
3. It writes checkpoints with `checkpoints.write` into `task.checkpoints`, with `task.environment()`, so that a resume
   in another environment is refused; or with `task.write_checkpoint`, which is for several processes too and lets
   training go on while the files are hashed and synced to the disk. Before it reads a checkpoint, it calls
   `task.share_checkpoint`. Between steps it checks `stop_requested()` on all ranks together (`ranks.any_rank`); if one
   has received a request, it writes a checkpoint, calls `task.finish_checkpoint`, and raises Interrupted.
4. It leaves the weights to export in `task.model`, or if each process has only a share of them, in `Trained.weights`
   of rank 0.

A job without `task.events.progress` counts as stalled; rank 0 alone writes events.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from training import distributed
from training.batching.batches import LengthGroupedBatches, TokenRows, steps_per_epoch
from training.distributed import machine_files, ranks
from training.engine import checkpoints, training_environment
from training.engine.checkpoints import BackgroundCall
from training.jobs.program import Interrupted, stop_requested
from training.jobs.protocol import Events, rank
from training.jobs.user_code import CodeField, is_function_of
from training.recipe.tables.engines import ENGINES
from training.recipe.tables.strategies import STRATEGIES
from training.task_types.task_type import WholeStep

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedModel

    from training.engine.collation import Collate
    from training.recipe import ResolvedCompute, Training
    from training.task_types.task_type import Loss, TaskType


@dataclass(frozen=True)
class Task:
    """The input of an engine. B rows of a batch, L labels."""

    model: PreTrainedModel
    """The base model with a head for the labels."""
    train: TokenRows
    validation: TokenRows
    collate: Collate
    """Converts the features of a batch to tensors; random if the recipe's collator draws numbers."""
    loss: Loss | None
    """Of logits (B, L) and labels (B,), the mean over a batch; None: the model's own."""
    task_type: TaskType
    """Its `predictions` come from a batch's outputs; `target_count` is the number of targets of a batch's loss."""
    metrics: Callable[[pa.Table], dict[str, float]]
    """Computes the recipe's metrics by name from the predictions of all validation rows, in order."""
    training: Training
    """The recipe's training section, with batch sizes that fit into memory."""
    compute: ResolvedCompute
    """The recipe's compute section, with `auto` resolved."""
    global_batch_size: int
    """Rows of an optimizer step over all processes."""
    checkpoints: Path
    """The folder for checkpoints, kept from one try to the next."""
    named_checkpoint: Path | None
    """The checkpoint of another job to start from, if the recipe names one."""
    events: Events
    missing_weights: int = 0
    """Weights of the base model that its files lack, without those of the head."""
    _completing: BackgroundCall = field(default_factory=BackgroundCall, init=False, repr=False)

    def begin(self) -> Path | None:
        """The job's newest intact checkpoint; without one, the checkpoint that the recipe names, or None.

        Every rank calls it and gets the same. Raises UserError if the named checkpoint cannot be resumed from, or if
        the processes are not connected, and Interrupted on a request to stop.
        """
        if (processes := self.compute.num_processes) != ranks.world_size():
            message = f"{self.training.engine!r} would train alone in each of {processes} processes: create "
            message += "accelerate.PartialState() first in it, or set compute.num_processes to 1."
            raise _FIELD.error(message)
        newest = self._newest()
        start, threads = ranks.broadcast(self._choose_start(newest) if rank() == 0 else (None, None))
        if start is not None:
            start = self.checkpoints / start.name  # rank 0's machine may have another path
            if start != newest:
                self.share_checkpoint(start)
            if rank() == 0:
                self.events.note(f"resuming from {start.name}")
        if rank() == 0 and torch.cuda.is_available() and not self.training.extra.get("full_determinism"):
            self.events.note("a killed run resumes to identical weights only if extra.full_determinism is true")
        if threads is not None:
            torch.set_num_threads(threads)
        if any(ranks.any_rank(stop_requested())):
            raise Interrupted("stopped before the first step")
        return start

    def batches(self, rank: int = 0) -> LengthGroupedBatches:
        """The row numbers of a rank's batches in training."""
        task_type = self.task_type
        return LengthGroupedBatches(
            self.train.lengths,
            self.global_batch_size,
            accumulation=self.training.gradient_accumulation_steps,
            world=self.compute.num_processes,
            rank=rank,
            seed=self.training.seed,
            targets=self.train.targets,
            partners=task_type.partners(self.train) if isinstance(task_type, WholeStep) else None,
        )

    def environment(self) -> dict[str, Any]:
        """The environment that must be the same to resume exactly from a checkpoint of this process."""
        steps = steps_per_epoch(len(self.train), self.global_batch_size, self.compute.num_processes)
        return training_environment.training_environment(self.training, self.compute, self.global_batch_size, steps)

    @contextmanager
    def write_checkpoint(self, step: int, needs: Sequence[str]) -> Iterator[Path]:
        """Yields the folder for a checkpoint's files; every rank calls it.

        First, rank 0 removes all checkpoints but the newest two and those that these need. While training goes
        on, a thread of rank 0 completes and reports the new one. An error there is raised by the next call, or by
        `finish_checkpoint`.
        """
        began, final = time.monotonic(), self.checkpoints / checkpoints.name(step)
        self._completing.wait()
        if rank() == 0:
            # Right before the next files are written, and not once a checkpoint is complete: Linux uses memory again
            # that was freed a moment ago. Memory that is free for some seconds may go back from a virtual machine to
            # its host, and is slow to get again.
            checkpoints.rotate(self.checkpoints)
        staging = nullcontext(checkpoints.staging_folder(final))
        with checkpoints.open_staging(final) if rank() == 0 else staging as folder:
            if rank() in machine_files.first_ranks(self.checkpoints):
                folder.mkdir(exist_ok=True)
            ranks.barrier()  # the folder exists
            yield folder
            machine_files.collect(folder)
        if rank() > 0:
            return
        environment = self.environment()  # in another thread, torch counts other threads
        paused = time.monotonic() - began

        def complete() -> None:
            checkpoints.complete(final, needs, environment)
            seconds = time.monotonic() - began
            self.events.write("checkpoint", step=step, seconds=round(seconds, 3), paused=round(paused, 3))

        self._completing.start(complete)

    def finish_checkpoint(self) -> None:
        """Waits until the last checkpoint is complete; every rank calls it. Rank 0 raises the error of its thread."""
        self._completing.wait()
        ranks.barrier()

    @property
    def has_lost_checkpoint(self) -> bool:
        """Whether the last checkpoint could not be completed; the next one raises the error."""
        return self._completing.has_failed

    @contextmanager
    def finishing_checkpoint(self) -> Iterator[None]:
        """Waits at the end until the last checkpoint is complete. Raises the error that prevented it, but not after
        another error, which matters more."""
        try:
            yield
        except Exception:
            with suppress(Exception):
                self._completing.wait()
            raise
        finally:
            self._completing.wait()

    def share_checkpoint(self, checkpoint: Path, source: int = 0) -> None:
        """Gives each machine a copy of a checkpoint, and of those that it needs, from the machine of rank `source`.

        Every rank calls this before it reads a checkpoint. Waits until the last one is complete.
        """
        self.finish_checkpoint()
        if len(machine_files.first_ranks(self.checkpoints)) == 1:
            return
        is_source = rank() == source
        names = [path.name for path in [*checkpoints.list_needed(checkpoint), checkpoint]] if is_source else []
        for name in ranks.broadcast(names, source):
            path = self.checkpoints / name
            manifest = ranks.broadcast(checkpoints.read_manifest(path) if is_source else None, source)
            is_first = rank() in machine_files.first_ranks(self.checkpoints)
            is_same = is_first and checkpoints.read_manifest(path) == manifest
            has_copy = is_same and checkpoints.find_damage(path, with_needed=False) is None
            machine_files.distribute(path, source, has_copy)
            if is_first and not has_copy and not is_source and (key := os.environ.get(checkpoints.SIGNING_KEY)):
                checkpoints.sign(path, Path(key))  # a machine of the same training is trusted

    def _newest(self) -> Path | None:
        """The newest intact checkpoint of any machine, which every machine has afterwards."""
        is_first = rank() in machine_files.first_ranks(self.checkpoints)
        found = checkpoints.find_newest_intact(self.checkpoints, self.events.warning) if is_first else None
        steps = ranks.all_gather(-1 if found is None else checkpoints.step_of(found))
        if max(steps) < 0:
            return None
        newest = self.checkpoints / checkpoints.name(max(steps))
        self.share_checkpoint(newest, source=steps.index(max(steps)))
        if is_first and rank() > 0:  # rank 0 does so before it writes a checkpoint
            checkpoints.rotate(self.checkpoints)
        return newest

    def _choose_start(self, found: Path | None) -> tuple[Path | None, int | None]:
        """The checkpoint to resume from, given the newest of this job, and the number of threads to take over."""
        named = self.named_checkpoint
        # An earlier one than the named checkpoint was copied because the named one needs it; the copy of the named one
        # was interrupted, or is damaged.
        if found is not None and (named is None or checkpoints.step_of(found) >= checkpoints.step_of(named)):
            return found, self._threads_for(found, training_environment.ACCEPTED)
        if named is None:
            return None, None
        checkpoints.require_intact(named)
        key = checkpoints.key_of(self.training, self.compute)
        if key is not None:
            checkpoints.require_own(named, key)
        threads = self._threads_for(named, checkpoints.NAMED)
        checkpoints.adopt(named, self.checkpoints, key)
        return self.checkpoints / named.name, threads

    def _threads_for(self, checkpoint: Path, where: str) -> int | None:
        """The number of threads that wrote the checkpoint, if this process has another number and resumes exactly.

        Raises UserError if a resume from the checkpoint's environment is impossible or not accepted.
        """
        written, here, accepted = (
            checkpoints.read_environment(checkpoint),
            self.environment(),
            self.training.inexact_resume,
        )
        if differences := training_environment.find_differences(checkpoint, where, written, here, accepted=accepted):
            self.events.warning(f"{checkpoint.name} was written with {differences}: this run ends with other weights.")
        threads, current = written.get(training_environment.THREADS), here[training_environment.THREADS]
        if accepted or threads in (None, current):
            return None
        message = f"computing with {threads} threads per process, not {current}"
        self.events.note(f"{message}, because {checkpoint.name} was written with them")
        return int(threads)


@dataclass(frozen=True)
class Trained:
    """The result of a training; the same on every rank except for the weights."""

    steps: int
    """Optimizer steps, those before a resume included."""
    epochs: float
    train_loss: float
    """The mean over all steps."""
    rows_per_second: float
    """Training rows over all processes since this try began; read on rank 0 alone."""
    best_step: int | None = None
    best_metric: float | None = None
    weights: dict[str, torch.Tensor] | None = None
    """The weights to export, on rank 0, if its model has only a share of them; else None."""


def is_undefined(metric: str, value: float) -> bool:
    """Whether an evaluation says nothing of the metric that chooses checkpoints. A loss that is no number is a bad one:
    training has diverged."""
    return metric.removeprefix("eval_") != "loss" and math.isnan(value)


def load(name: str) -> Callable[[Task], Trained]:
    """The engine of this name, or the user's `module:function`. Raises UserError if it does not exist.

    A user's engine raises UserError if it does not return a Trained.
    """
    if name in ENGINES:
        train: Callable[[Task], Trained] = importlib.import_module(ENGINES[name].module).train
        return train
    users_engine = _FIELD.load(name)

    def train_checked(task: Task) -> Trained:
        trained = users_engine(task)
        if not isinstance(trained, Trained):
            raise _FIELD.error(
                f"{name!r} returned {type(trained).__name__}: it must return a training.engine.training_task.Trained."
            )
        return trained

    return train_checked


_FIELD = CodeField(
    kind="training",
    where="training.engine",
    example="my_engine:train",
    accepted="a function that takes a Task and returns a Trained, both of training.engine.training_task",
    accepts=is_function_of(1),
)


def require_requested_processes(state: PartialState, compute: ResolvedCompute, gpus: int = 1) -> None:
    """Raises RuntimeError if the running processes are not those that the recipe requests; every rank checks itself.

    accelerate's launchers fall back silently, to one process or to ranks that train alone. `gpus` are those that this
    process computes on.
    """
    processes, device = compute.num_processes, "cuda" if torch.cuda.is_available() else "cpu"
    distributed_type = distributed.load(compute.strategy).DISTRIBUTED_TYPE[device]
    is_alone = processes == 1 and STRATEGIES[compute.strategy].replicates
    expected = {
        "processes": processes,
        "launched": processes,
        "distributed type": "NO" if is_alone else distributed_type,
        "GPUs per process": True,
    }
    running = {
        "processes": state.num_processes,
        "launched": int(os.environ.get("WORLD_SIZE", "1")),
        "distributed type": state.distributed_type.value,
        "GPUs per process": gpus <= 1,
    }
    if running != expected:
        raise RuntimeError(f"requested {expected}, but {running} is running")
