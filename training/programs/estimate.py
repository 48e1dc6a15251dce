"""What a training will need, found before its first step: `python -m training.programs.estimate JOB`, or by training
itself.

JOB is that of training.programs.fit. The figures are those of `Estimate`. The memory for activations is measured: one
forward and backward pass on the longest batch of the first epoch, by rank 0 on the model as it is before it is shared
out. It leaves nothing behind: random states, buffers and gradients are put back, so the training's bytes are the same
with it and without.

What is assumed: an optimizer remembers as much as `recipe.optimizers` says; shared strategies divide evenly;
torch_compile and code of the recipe's own take no more than the plain model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.jobs import resources
from training.jobs.program import run_program, short_of_memory
from training.jobs.protocol import EVENTS, Events, Job, rank, read_events
from training.recipe.tables.engines import ENGINES
from training.recipe.tables.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    import torch

    from training.engine.training_task import Task

KEPT_CHECKPOINTS = 3
"""The newest two, and one that is being written; the best one comes on top."""
NUMBER = 4
"""Bytes of a weight: they are loaded in float32."""
LATER_IMPORTS, KERNELS = 80_000_000, 100_000_000
"""Bytes of what comes after the trial on a CPU: libraries for metrics and pictures; in a lower precision the kernels
that are compiled for each new shape of a batch."""
ZERO3_BUFFERS = 3
"""Of a bucket each: DeepSpeed sets them aside to fetch weights ahead, and to gather and to average gradients."""
SPREAD = 1.1
"""Batches of other shapes leave gaps between what was freed and what is needed next: by so much, as measured."""
_SMALLER = "lower tokens.max_length, or choose a smaller model"


@dataclass(frozen=True)
class Estimate:
    """What a training needs; plain JSON values."""

    parameters: int
    trainable: int
    steps: int
    """Of the optimizer."""
    tokens_an_epoch: int
    micro_batch: int
    """Rows that a process takes at once."""
    memory_mb: int | None
    """Of the process that takes most, at its peak: its GPU's, else the machine's. 10^6 bytes; None where not even one
    row could be tried on the whole model."""
    memory_a_row_mb: float
    """How much of it hangs on each row that is taken at once."""
    disk_mb: int
    """For checkpoints and the model."""


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """The estimate for a job of training.programs.fit, as figures."""
    from training.models import loading as model
    from training.programs import fit

    model.make_deterministic()
    return asdict(make(fit.make_task(job_dir, job, events)))


def tell_first(task: Task, job_dir: Path) -> None:
    """Says what a job will need, in its events, before its first step; nothing where it has begun before.

    Every rank calls it. Warns where there is too little memory; raises UserError where there is too little disk, on all
    ranks, for one that waits for another does not hear that it is over.
    """
    told = told_before(read_events(job_dir / EVENTS, 0, ["estimate"])[0])
    if (
        any(task.checkpoints.glob("checkpoint-*"))
        or told.get("micro_batch") == task.training.per_device_train_batch_size
    ):
        return
    require_disk(task.training.engine, task.checkpoints, _disk(task, sizes(task)))
    if rank() > 0:
        return
    memory = memory_of_a_process(int(os.environ.get("LOCAL_WORLD_SIZE") or task.compute.num_processes))
    made = asdict(make(task))
    task.events.note(sentence(made, memory))
    if warning := too_little(made, memory):
        task.events.warning(warning)
    task.events.write("estimate", **made)


def require_disk(engine: str, folder: Path, needed: float) -> None:
    """Raises UserError where the folder's disk has less than `needed` bytes free. What an engine of the recipe's own
    keeps is for it to know: it is refused nothing."""
    if engine in ENGINES:
        resources.require_disk(folder, needed)


def told_before(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The newest estimate in a job's events; nothing where there is none."""
    return next(reversed([event for event in events if event["kind"] == "estimate"]), {})


def sentence(estimate: Mapping[str, Any], memory: int | None) -> str:
    """An estimate in a line; `memory` are the bytes that a process may take, where that is known."""
    trained = "all" if estimate["trainable"] == estimate["parameters"] else f"{estimate['trainable']:,} of them"
    needs = "?" if estimate["memory_mb"] is None else f"about {resources.told(estimate['memory_mb'] * 1e6)}"
    of = "" if memory is None else f" (of {resources.told(memory)})"
    return (
        f"{estimate['parameters']:,} parameters, {trained} trained; {estimate['steps']:,} steps, "
        f"{estimate['tokens_an_epoch']:,} tokens an epoch; {needs} of memory a process{of}, "
        f"{resources.told(estimate['disk_mb'] * 1e6)} of disk"
    )


def too_little(estimate: Mapping[str, Any], memory: int | None) -> str | None:
    """What to say where a process may take fewer bytes than it needs; None where all is well, or not known."""
    needs, rows, a_row = (estimate[name] for name in ("memory_mb", "micro_batch", "memory_a_row_mb"))
    if needs is None:
        return f"memory ran out when a single row was tried: {_SMALLER}."
    if memory is None or needs * 1e6 <= memory:
        return None
    fit = rows - ceil((needs - memory / 1e6) / a_row) if a_row else 0
    would = (
        f"training.per_device_train_batch_size {fit} would fit"
        if fit >= 1
        else f"not even single rows would fit: {_SMALLER}"
    )
    return (
        f"a process needs about {resources.told(needs * 1e6)} of memory for {rows} rows at a time, and may take "
        f"{resources.told(memory)}: {would}. When memory runs out, training goes on with fewer rows at a time."
    )


def memory_of_a_process(processes: int) -> int | None:
    """The bytes that this process, one of so many on this machine, may take in all, with what it has: of its GPU's
    memory, else of the machine's."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()
    left = resources.memory_left(processes)
    return None if left is None else left + resources.used_bytes()


def peak_bytes() -> int:
    """The most memory that this process has taken since the model was loaded."""
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else resources.used_bytes("VmHWM")


def make(task: Task) -> Estimate:
    """The estimate, with a trial."""
    from training.batching.batches import LengthGroupedBatches

    training, rows = task.training, task.training.per_device_train_batch_size
    batches = LengthGroupedBatches(
        task.train.lengths,
        task.rows_a_step,
        accumulation=training.gradient_accumulation_steps,
        world=task.compute.num_processes,
        seed=training.seed,
    )
    size = sizes(task)
    before = _before(task, size)
    trial = _trial(task, next(iter(batches)))
    memory, a_row = None, 0.0
    if trial is not None:
        a_row = SPREAD * trial.forward / trial.rows
        memory = before + SPREAD * trial.peak + (rows - trial.rows) * a_row + _beside(task, size)
    epochs = ceil(training.num_train_epochs * batches.steps)
    return Estimate(
        parameters=size.exported // NUMBER,
        trainable=size.gradients // NUMBER,
        steps=training.max_steps if training.max_steps > 0 else epochs,
        tokens_an_epoch=int(task.train.lengths.sum()),
        micro_batch=rows,
        memory_mb=None if memory is None else round(memory / 1e6),
        memory_a_row_mb=round(a_row / 1e6, 3),
        disk_mb=ceil(_disk(task, size) / 1e6),
    )


@dataclass(frozen=True)
class Sizes:
    """Bytes of the whole model, by all processes together."""

    weights: int
    exported: int
    """The weights as they are exported, in float32."""
    gradients: int
    state: int
    """Of the optimizer."""


def sizes(task: Task) -> Sizes:
    """Those of the task's model, before it is shared out."""
    held = sum(weight.numel() * weight.element_size() for weight in task.model.parameters())
    numbers = task.model.num_parameters()  # of weights in 4 bits, too, that many
    trainable = sum(weight.numel() for weight in task.model.parameters() if weight.requires_grad)
    state = OPTIMIZERS[task.training.optim].state_bytes * trainable
    return Sizes(held, NUMBER * numbers, NUMBER * trainable, round(state))


def _before(task: Task, sizes: Sizes) -> int:
    """What training begins with: the weights alone on a GPU, else all libraries, too."""
    import torch

    if torch.cuda.is_available():
        return sizes.weights
    return resources.used_bytes() + LATER_IMPORTS + (task.compute.mixed_precision != "no") * KERNELS


def _beside(task: Task, sizes: Sizes) -> float:
    """What a process takes beside the whole weights and a pass over them."""
    import torch

    from training.distributed.zero import BUCKET

    compute, best = task.compute, _kept(task, sizes) * task.training.load_best_model_at_end
    if task.training.lora and not torch.cuda.is_available():
        best += sizes.exported  # the base model once more, which the adapters are added to
    processes, strategy, offload = compute.num_processes, compute.strategy, compute.offload
    if strategy == "ddp":
        return best + sizes.state + (processes > 1) * sizes.gradients  # which travel in buckets of their own
    elsewhere = offload != "no" and torch.cuda.is_available()
    # A share of the weights in full precision and of what the optimizer remembers; gradients on their way; and what is
    # put together of the others' weights, at most all.
    share = 0.0 if elsewhere else (sizes.weights + sizes.state) / processes
    together = (strategy != "deepspeed-zero2") * sizes.weights
    buffers = ZERO3_BUFFERS * NUMBER * min(BUCKET, sizes.weights // NUMBER) if strategy == "deepspeed-zero3" else 0
    return best + share + sizes.gradients + together + buffers


def _disk(task: Task, sizes: Sizes) -> float:
    """The checkpoints that are there at once, and the exported model."""
    checkpoint: float = _kept(task, sizes) + sizes.state
    if task.compute.strategy.startswith("deepspeed"):  # the weights once more, as the model computes with them
        checkpoint += sizes.weights if task.compute.mixed_precision == "no" else sizes.weights / 2
    kept = KEPT_CHECKPOINTS + task.training.load_best_model_at_end
    return kept * checkpoint + sizes.exported


def _kept(task: Task, sizes: Sizes) -> int:
    """The weights in a checkpoint: of adapters these alone, where the model is not shared out."""
    return sizes.gradients if task.training.lora and task.compute.strategy == "ddp" else sizes.weights


@dataclass(frozen=True)
class Trial:
    """What one forward and backward pass took, in bytes beyond what the process held before."""

    rows: int
    forward: int
    """The activations that the backward pass needs, weights in a lower precision among them."""
    peak: int


def _trial(task: Task, first: list[int]) -> Trial | None:
    """A trial on a batch; where that does not fit into memory, on half of it, and so on."""
    from training.batching.random_states import Numbered

    assert isinstance(first, Numbered)
    rows = len(first)
    while rows:
        some = Numbered(first[:rows], first.draws_from)
        try:
            with _untouched(task):
                return _passes(task, task.collate(task.train.__getitems__(some)))
        except (MemoryError, RuntimeError) as error:
            if not short_of_memory(error):
                raise
        rows //= 2
    return None


def _passes(task: Task, batch: dict[str, torch.Tensor]) -> Trial:
    import torch

    from training.models.loading import DTYPES

    device = task.model.device
    precision = DTYPES[task.compute.mixed_precision]
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    gauge = _Gauge(device)
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        if task.loss is None:
            loss = task.model(**batch).loss
        else:
            outputs = task.task_type.forward(task.model, batch)
            loss = task.loss(outputs["logits"], batch["labels"])
    forward = gauge.peak()
    loss.backward()
    return Trial(len(batch["labels"]), forward, gauge.peak())


class _Gauge:
    """The most memory taken since it was made, in bytes: of the GPU by tensors, else of the process."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._gpu = torch.cuda if device.type == "cuda" else None
        if self._gpu:
            self._gpu.reset_peak_memory_stats()
            self._before = self._gpu.memory_allocated()
        else:
            resources.forget_peak()
            self._before = resources.used_bytes()

    def peak(self) -> int:
        return (self._gpu.max_memory_allocated() if self._gpu else resources.used_bytes("VmHWM")) - self._before


@contextmanager
def _untouched(task: Task) -> Iterator[None]:
    """The model as it is while it trains, on the device where it does; afterwards all is as it was before."""
    import torch

    from training.batching.random_states import generators_from

    model, extra = task.model, task.training.extra
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    training, device = model.training, model.device
    thrifty = extra.get("activation_checkpointing", extra.get("gradient_checkpointing", False))
    kwargs = extra.get("activation_checkpointing_kwargs", extra.get("gradient_checkpointing_kwargs"))
    with generators_from([0]), torch.random.fork_rng(gpus):
        try:
            model.to(torch.device("cuda", gpus[0]) if gpus else device).train()
            if thrifty:
                model.gradient_checkpointing_enable(kwargs)
            yield
        finally:
            if thrifty:
                model.gradient_checkpointing_disable()
            model.zero_grad(set_to_none=True)
            model.train(training).to(device)
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            if gpus:
                torch.cuda.empty_cache()
            resources.forget_peak()


if __name__ == "__main__":
    run_program(main)
