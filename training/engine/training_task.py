"""What trains: transformers' Trainer, a plain loop over Accelerate, or a function of the recipe's own.

An engine is a function `train(task) -> Trained`, called once on every process, with the model in float32 on the CPU
(with `training.lora.quantization` in 4 bits on its GPU), of which it trains the weights that want a gradient:

1. It has the processes find each other (accelerate's state does that), and then calls `task.begin()`, which gives the
   checkpoint to go on from, or None.
2. It trains `task.model` on `task.train` as `task.training` says, the recipe's section of that name. What it takes no
   notice of is for the recipe's author to know.
3. It writes checkpoints with `checkpoints.writing` into `task.checkpoints`, from which it can go on, and gives them
   `task.circumstances()`, so that going on under others is refused. Between steps it looks at `stop_requested()` on all
   ranks together (`ranks.any_rank`), and then writes one and raises Interrupted.
4. It leaves the weights to be exported in `task.model`, or where each process has only a share of them, in
   `Trained.weights` of rank 0.

`task.events.progress` is the sign of life without which a job counts as stalled; rank 0 alone writes events.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import distributed
from training.engine import checkpoints, environment
from training.jobs.program import Interrupted, stop_requested
from training.jobs.protocol import Events, rank
from training.jobs.user_code import Place
from training.recipe.tables.engines import ENGINES

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from accelerate import PartialState
    from transformers import PreTrainedModel

    from training.batching.batches import TokenRows
    from training.engine.collation import Collate
    from training.recipe import Compute, ResolvedCompute, Training
    from training.task_types.losses import Loss
    from training.task_types.task_type import TaskType


@dataclass(frozen=True)
class Task:
    """All that an engine trains with. B rows of a batch, L labels."""

    model: PreTrainedModel
    """The base model with a head for the labels."""
    train: TokenRows
    validation: TokenRows
    collate: Collate
    """Makes a batch of features into tensors; random ones where the recipe's collator draws numbers."""
    loss: Loss | None
    """Of logits (B, L) and labels (B,), the mean over a batch; None: the model's own."""
    task_type: TaskType
    """Says what the model makes of each row of a batch (`predictions`), and how many targets its loss is the mean of
    (`targets`)."""
    metrics: Callable[[pa.Table], dict[str, float]]
    """Of the answers to all rows of the validation split, in order, the recipe's metrics by name."""
    training: Training
    """The recipe's training section, with batch sizes that fit into memory."""
    compute: ResolvedCompute
    """The recipe's compute section, with `auto` resolved."""
    rows_a_step: int
    """Rows of an optimizer step over all processes."""
    checkpoints: Path
    """The folder for checkpoints, kept from one try to the next."""
    named_checkpoint: Path | None
    """A checkpoint of another job to begin with, where the recipe names one."""
    events: Events

    def begin(self) -> Path | None:
        """The job's newest good checkpoint; before there is one, that of another job which the recipe names; else None.

        Every rank calls it, and gets the same. Raises UserError where the named one cannot be gone on from, or the
        processes have not found each other, Interrupted where a rank was asked to stop meanwhile.
        """
        import torch

        from training.distributed import ranks

        if (processes := self.compute.num_processes) != ranks.joined():
            message = f"{self.training.engine!r} would train alone in each of {processes} processes: have it make "
            raise _PLACE.refused(f"{message}accelerate.PartialState() first, or set compute.num_processes to 1.")
        start, threads = ranks.from_first(self._newest() if rank() == 0 else (None, None))
        if start is not None and rank() == 0:
            self.events.note(f"going on from {start.name}")
        if rank() == 0 and torch.cuda.is_available() and not self.training.extra.get("full_determinism"):
            self.events.note(
                "killed and gone on with, it ends with the same bytes only by extra.full_determinism: true"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        if any(ranks.any_rank(stop_requested())):
            raise Interrupted("stopped before the first step")
        return start

    def circumstances(self) -> dict[str, Any]:
        """What must be the same where a checkpoint that is written now is gone on from."""
        return environment.of(self)

    def _newest(self) -> tuple[Path | None, int | None]:
        """The checkpoint to go on from, and the number of threads to take over from it."""
        found, named = checkpoints.newest_good(self.checkpoints, self.events.warning), self.named_checkpoint
        # One before the named checkpoint is only what that needs: its copy was cut short, or damaged since.
        if found is not None and (named is None or checkpoints.step_of(found) >= checkpoints.step_of(named)):
            return found, self._threads_for(found, environment.ACCEPTED)
        if named is None:
            return None, None
        checkpoints.require_good(named)
        key = checkpoint_key(self.training, self.compute)
        if key is not None:
            checkpoints.require_own(named, key)
        threads = self._threads_for(named, checkpoints.NAMED)
        checkpoints.adopt(named, self.checkpoints, key)
        return self.checkpoints / named.name, threads

    def _threads_for(self, checkpoint: Path, where: str) -> int | None:
        """The number of threads that wrote it, where that is not this process's; None where the bytes are given up.

        Raises UserError where it was written under what cannot be gone on from here, or is not accepted.
        """
        written, accepted = checkpoints.written_by(checkpoint), self.training.inexact_resume
        if not written and self.training.engine in ENGINES:
            written = {"engine": "trainer"}  # before checkpoints told, there was no other
        here = {**self.circumstances(), "accepted": accepted}
        if told := environment.require_exact(checkpoint, where, written, here):
            self.events.warning(f"{checkpoint.name} was written with {told}: this run ends with other bytes.")
        threads = written.get(environment.THREADS)
        if accepted or threads in (None, here[environment.THREADS]):
            return None
        own = here[environment.THREADS]
        self.events.note(
            f"computing with {threads} threads a process, not {own}, as {checkpoint.name} was written with"
        )
        return int(threads)


def needs_own_checkpoint(training: Training, compute: Compute) -> bool:
    """Whether these sections of a recipe refuse a checkpoint that this home did not write: FSDP and DeepSpeed unpickle
    theirs, and how an engine of the user's loads its own is not known."""
    loads_safely = training.engine in ENGINES and not distributed.load(compute.strategy).UNPICKLES
    return not loads_safely and not training.trust_checkpoint


def checkpoint_key(training: Training, compute: Compute) -> Path | None:
    """The key by which a checkpoint of this home is known, where one from elsewhere is refused; else None."""
    if not needs_own_checkpoint(training, compute):
        return None
    # Without the variable there is no key, and every checkpoint is one from elsewhere.
    return Path(os.environ.get(checkpoints.SEAL_KEY, os.devnull + "/none"))


@dataclass(frozen=True)
class Trained:
    """What came of a training; the same on every rank but for the weights."""

    steps: int
    """Optimizer steps, those before a resume included."""
    epochs: float
    train_loss: float
    """The mean over all steps."""
    samples_per_second: float
    """Training rows over all processes, since this try began."""
    best_step: int | None = None
    best_metric: float | None = None
    weights: dict[str, torch.Tensor] | None = None
    """The weights for the export on rank 0, where the model has only a share of its own; else None."""


def load(name: str) -> Callable[[Task], Trained]:
    """The engine of this name, or that of the recipe's author. Raises UserError where there is none.

    The author's raises UserError where it gives no Trained.
    """
    if name in ENGINES:
        train: Callable[[Task], Trained] = importlib.import_module(ENGINES[name].module).train
        return train
    theirs = _PLACE.load(name)

    def checked(task: Task) -> Trained:
        trained = theirs(task)
        if not isinstance(trained, Trained):
            raise _PLACE.refused(
                f"{name!r} gave {type(trained).__name__}: it must give a training.engine.training_task.Trained."
            )
        return trained

    return checked


def _takes_one(found: Any) -> bool:
    try:
        inspect.signature(found).bind(None)
    except (TypeError, ValueError):
        return False
    return callable(found) and not isinstance(found, type)


_PLACE = Place(
    kind="training",
    where="training.engine",
    example="my_engine:train",
    accepted="a function that takes a Task and gives a Trained, both of training.engine.training_task",
    fits=_takes_one,
)


def require_as_asked(state: PartialState, compute: ResolvedCompute, gpus: int = 1) -> None:
    """Raises RuntimeError where what runs is not what the recipe asked for; every rank looks for itself.

    The launchers of accelerate fall back in silence, to one process or to ranks that train alone. `gpus` are those
    that this process computes on.
    """
    import torch

    processes, device = compute.num_processes, "cuda" if torch.cuda.is_available() else "cpu"
    shared = distributed.load(compute.strategy).DISTRIBUTED_TYPE[device]
    task_type = "NO" if processes == 1 else shared
    asked = {"processes": processes, "launched": processes, "distributed type": task_type, "GPUs a process": True}
    runs = {
        "processes": state.num_processes,
        "launched": int(os.environ.get("WORLD_SIZE", "1")),
        "distributed type": state.distributed_type.value,
        "GPUs a process": gpus <= 1,
    }
    if runs != asked:
        raise RuntimeError(f"asked for {asked}, but what runs is {runs}")
