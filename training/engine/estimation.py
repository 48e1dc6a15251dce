"""Estimate of a training's steps, tokens, memory and disk, before its first step.

The memory for activations is measured: rank 0 runs one forward and backward pass on the longest batch of the first
epoch, before the model is sharded. Random states, buffers and gradients are restored, so the training's bytes are the
same with and without the estimate.

Assumptions: an optimizer's state is as large as `recipe.tables.optimizers` says; sharding strategies divide evenly;
torch_compile and user code take no more than the plain model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.distributed.zero import BUCKET
from training.jobs import resources
from training.jobs.program import is_out_of_memory
from training.jobs.protocol import EVENTS, rank, read_events
from training.recipe.rules.training_rules import improbable_rates
from training.recipe.tables.engines import ENGINES
from training.recipe.tables.optimizers import OPTIMIZERS
from training.task_types.task_type import WholeStep

if TYPE_CHECKING:
    import torch

    from training.engine.training_task import Task
    from training.recipe import Training

KEPT_CHECKPOINTS = 3
"""Two are kept, and a third is being written, or stays until the next one is. The best one is counted separately."""
BYTES_PER_WEIGHT = 4
"""Weights are loaded in float32."""
LATER_IMPORTS, KERNELS = 80_000_000, 100_000_000
"""Bytes that a process on a CPU takes after the trial: for plots, unless their library is loaded by then; in a lower
precision the kernels compiled for each new shape of a batch."""
ZERO3_BUFFERS = 3
"""Buffers of one bucket each that DeepSpeed allocates to prefetch weights and to gather and average gradients."""
FRAGMENTATION = 1.1
"""Measured overhead: batches of other shapes leave gaps between freed and newly allocated memory."""
_SMALLER = "lower tokens.max_length, or choose a smaller model"


@dataclass(frozen=True)
class Estimate:
    """The resources that a training needs, as plain JSON values."""

    parameters: int
    trainable: int
    steps: int
    """Optimizer steps."""
    tokens_per_epoch: int
    micro_batch_size: int
    """Rows in one pass of a process."""
    memory_mb: int | None
    """Peak memory of the largest process, in 10^6 bytes: its GPU's, else the machine's. None if not even one row fits
    together with the whole model."""
    memory_per_row_mb: float
    """The part of memory_mb for each row of a micro-batch."""
    disk_mb: int
    """For checkpoints and the model."""


def report_estimate(task: Task, job_dir: Path) -> None:
    """Writes the estimate to the job's events before the first step. Does nothing if the job has begun before.

    Every rank calls it. Warns if memory is short. Raises UserError on all ranks if the disk is too small: ranks that
    wait for a failed one would not notice.
    """
    previous = latest_estimate(read_events(job_dir / EVENTS, 0, ["estimate"])[0])
    same_batches = previous.get("micro_batch_size") == task.training.per_device_train_batch_size
    if same_batches or any(task.checkpoints.glob("checkpoint-*")):
        return
    require_disk(task.training.engine, task.checkpoints, _disk(task, sizes(task)))
    if rank() > 0:
        return
    memory = memory_of_a_process(int(os.environ.get("LOCAL_WORLD_SIZE") or task.compute.num_processes))
    figures = asdict(estimate(task))
    task.events.note(summary(figures, memory))
    if warning := memory_warning(figures, memory):
        task.events.warning(warning)
    if warning := warmup_warning(task.training, figures["steps"]):
        task.events.warning(warning)
    for where, message in improbable_rates(task.training):
        task.events.warning(f"{where}: {message}")
    task.events.write("estimate", **figures)


def require_disk(engine: str, folder: Path, needed: float) -> None:
    """Raises UserError if the folder's disk has less than `needed` bytes free. A user's engine is not checked: the size
    of its checkpoints is unknown."""
    if engine in ENGINES:
        resources.require_disk(folder, needed)


def latest_estimate(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the newest estimate in a job's events; empty if there is none."""
    return next(reversed([event for event in events if event["kind"] == "estimate"]), {})


def summary(estimate: Mapping[str, Any], memory: int | None) -> str:
    """Formats an estimate in one line; `memory` is the number of bytes that a process may take, if known."""
    trained = "all" if estimate["trainable"] == estimate["parameters"] else f"{estimate['trainable']:,} of them"
    needs = "?" if estimate["memory_mb"] is None else f"about {resources.as_text(estimate['memory_mb'] * 1e6)}"
    available = "" if memory is None else f" (of {resources.as_text(memory)})"
    return (
        f"{estimate['parameters']:,} parameters, {trained} trained; {estimate['steps']:,} steps, "
        f"{estimate['tokens_per_epoch']:,} tokens per epoch; {needs} of memory per process{available}, "
        f"{resources.as_text(estimate['disk_mb'] * 1e6)} of disk"
    )


def memory_warning(estimate: Mapping[str, Any], memory: int | None) -> str | None:
    """Returns a warning if a process needs more bytes than it may take; None if it fits, or if either is unknown."""
    needs, rows, per_row = (estimate[name] for name in ("memory_mb", "micro_batch_size", "memory_per_row_mb"))
    if needs is None:
        return f"memory ran out when a single row was tried: {_SMALLER}."
    if memory is None or needs * 1e6 <= memory:
        return None
    fitting = rows - ceil((needs - memory / 1e6) / per_row) if per_row else 0
    advice = (
        f"training.per_device_train_batch_size {fitting} would fit"
        if fitting >= 1
        else f"not even single rows would fit: {_SMALLER}"
    )
    return (
        f"a process needs about {resources.as_text(needs * 1e6)} of memory for {rows} rows at a time, and may take "
        f"{resources.as_text(memory)}: {advice}. When memory runs out, training continues with smaller micro-batches."
    )


def warmup_warning(training: Training, steps: int) -> str | None:
    """Returns a warning if the learning rate still rises when training ends after `steps`; None if it does not."""
    if (warmup := training.warmup_steps) < max(steps, 1):  # a share of the steps is below 1
        return None
    rate = training.learning_rate
    return (
        f"training.warmup_steps: {warmup:,g} steps of warm-up do not end within the {steps:,} of this training: "
        f"the learning rate only rises, to {rate * steps / warmup:.2g} of {rate:g}. Lower it, or give the share of all "
        "steps, such as 0.06."
    )


def memory_of_a_process(processes: int) -> int | None:
    """Returns the bytes that this process, one of `processes` on this machine, may use in total: of its GPU's memory,
    else of the machine's."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()
    available = resources.memory_left(processes)
    return None if available is None else available + resources.used_bytes()


def peak_bytes() -> int:
    """Returns the peak memory of this process since the model was loaded."""
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else resources.used_bytes("VmHWM")


def estimate(task: Task) -> Estimate:
    """Computes the estimate, with a trial pass."""
    training, rows = task.training, task.training.per_device_train_batch_size
    batches = task.batches()
    size = sizes(task)
    at_start = _memory_at_start(task, size)
    trial = _run_trial(task, next(iter(batches)))
    memory, per_row = None, 0.0
    if trial is not None:
        per_row = FRAGMENTATION * trial.forward / trial.rows
        activations = FRAGMENTATION * trial.peak + (rows - trial.rows) * per_row
        memory = at_start + activations + _other_memory(task, size)
    epochs = ceil(training.num_train_epochs * batches.steps)
    return Estimate(
        parameters=size.exported // BYTES_PER_WEIGHT,
        trainable=size.gradients // BYTES_PER_WEIGHT,
        steps=training.max_steps if training.max_steps > 0 else epochs,
        tokens_per_epoch=int(task.train.lengths.sum()),
        micro_batch_size=rows,
        memory_mb=None if memory is None else round(memory / 1e6),
        memory_per_row_mb=round(per_row / 1e6, 3),
        disk_mb=ceil(_disk(task, size) / 1e6),
    )


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of the whole model, over all processes together."""

    weights: int
    exported: int
    """The weights as they are exported, in float32."""
    gradients: int
    optimizer_state: int


def sizes(task: Task) -> ModelSizes:
    """Returns the sizes of the task's model before sharding."""
    weights_bytes = sum(weight.numel() * weight.element_size() for weight in task.model.parameters())
    count = task.model.num_parameters()  # counts each weight of a 4-bit layer
    trainable = sum(weight.numel() for weight in task.model.parameters() if weight.requires_grad)
    state = OPTIMIZERS[task.training.optim].state_bytes * trainable
    return ModelSizes(weights_bytes, BYTES_PER_WEIGHT * count, BYTES_PER_WEIGHT * trainable, round(state))


def _memory_at_start(task: Task, sizes: ModelSizes) -> int:
    """Memory at the start of training: the weights alone on a GPU, else with all libraries."""
    import torch

    if torch.cuda.is_available():
        return sizes.weights
    later = LATER_IMPORTS * ("matplotlib" not in sys.modules) + KERNELS * (task.compute.mixed_precision != "no")
    return resources.used_bytes() + later


_WHOLE_MODEL = ("deepspeed-zero1", "deepspeed-zero2")
"""The strategies besides ddp with which each process holds the whole model."""


def _other_memory(task: Task, sizes: ModelSizes) -> float:
    """Memory of a process in addition to the whole weights and one pass over them."""
    import torch

    compute, best_weights = task.compute, _checkpoint_weights(task, sizes) * task.training.load_best_model_at_end
    if task.training.lora and not torch.cuda.is_available():
        best_weights += sizes.exported  # a copy of the base model, to which the adapters are added
    processes, strategy, offload = compute.num_processes, compute.strategy, compute.offload
    if strategy == "ddp":
        return best_weights + sizes.optimizer_state + (processes > 1) * sizes.gradients  # DDP's buckets
    is_offloaded = offload != "no" and torch.cuda.is_available()
    # A share of the weights in full precision and of the optimizer state; gradients in flight; and the gathered weights
    # of the other ranks, at most all.
    share = 0.0 if is_offloaded else (sizes.weights + sizes.optimizer_state) / processes
    gathered = (strategy not in _WHOLE_MODEL) * sizes.weights
    bucket = min(BUCKET, sizes.weights // BYTES_PER_WEIGHT)
    buffers = ZERO3_BUFFERS * BYTES_PER_WEIGHT * bucket if strategy == "deepspeed-zero3" else 0
    return best_weights + share + sizes.gradients + gathered + buffers


def _disk(task: Task, sizes: ModelSizes) -> float:
    """Returns the bytes of all checkpoints that exist at once and of the exported model."""
    checkpoint: float = _checkpoint_weights(task, sizes) + sizes.optimizer_state
    if task.compute.strategy.startswith("deepspeed"):  # the weights once more, in the precision of the model's passes
        checkpoint += sizes.weights if task.compute.mixed_precision == "no" else sizes.weights / 2
    kept = KEPT_CHECKPOINTS + task.training.load_best_model_at_end
    return kept * checkpoint + sizes.exported


def _checkpoint_weights(task: Task, sizes: ModelSizes) -> int:
    """Returns the bytes of the weights in a checkpoint: of the adapters only, unless the model is sharded."""
    return sizes.gradients if task.training.lora and task.compute.strategy == "ddp" else sizes.weights


@dataclass(frozen=True)
class TriedBatch:
    """Additional bytes of one forward and backward pass."""

    rows: int
    forward: int
    """Activations for the backward pass, and weights in a lower precision."""
    peak: int


def _run_trial(task: Task, first: list[int]) -> TriedBatch | None:
    """Tries a batch; if it does not fit into memory, half of it, and so on. Returns None if not even one row fits."""
    from training.batching.random_states import SeededBatch

    assert isinstance(first, SeededBatch)
    rows = len(first)
    while rows:
        batch = SeededBatch(first[:rows], first.seeds)
        try:
            with _preserve_state(task):
                return _run_passes(task, task.collate(task.train.__getitems__(batch)))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        rows //= 2
    return None


def _run_passes(task: Task, batch: dict[str, torch.Tensor]) -> TriedBatch:
    from training.models.loading import autocast

    device = task.model.device
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    gauge = _MemoryGauge(device)
    with autocast(device, task.compute.mixed_precision):
        if task.loss is None:
            loss = task.model(**batch).loss
        else:
            if isinstance(task.task_type, WholeStep):  # engines compute those of the whole step
                (batch,) = task.task_type.prepare_step(task.model, [batch], lambda value: [value])
            outputs = task.task_type.forward(task.model, batch)
            loss = task.loss(outputs["logits"], batch["labels"])
    forward = gauge.peak()
    loss.backward()
    return TriedBatch(len(batch["labels"]), forward, gauge.peak())


class _MemoryGauge:
    """The peak memory since its creation, in bytes: of tensors on the GPU, else of the process."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._gpu = torch.cuda if device.type == "cuda" else None
        if self._gpu:
            self._gpu.reset_peak_memory_stats()
            self._before = self._gpu.memory_allocated()
        else:
            resources.reset_peak()
            self._before = resources.used_bytes()

    def peak(self) -> int:
        return (self._gpu.max_memory_allocated() if self._gpu else resources.used_bytes("VmHWM")) - self._before


@contextmanager
def _preserve_state(task: Task) -> Iterator[None]:
    """Puts the model into training mode on its training device; on leaving, restores it and the random states."""
    import torch

    from training.batching.random_states import seed_generators

    model, extra = task.model, task.training.extra
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    training, device = model.training, model.device
    checkpointing = extra.get("activation_checkpointing", extra.get("gradient_checkpointing", False))
    kwargs = extra.get("activation_checkpointing_kwargs", extra.get("gradient_checkpointing_kwargs"))
    with seed_generators([0]), torch.random.fork_rng(gpus):
        try:
            model.to(torch.device("cuda", gpus[0]) if gpus else device).train()
            if checkpointing:
                model.gradient_checkpointing_enable(kwargs)
            yield
        finally:
            if checkpointing:
                model.gradient_checkpointing_disable()
            model.zero_grad(set_to_none=True)
            model.train(training).to(device)
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            if gpus:
                torch.cuda.empty_cache()
            resources.reset_peak()
