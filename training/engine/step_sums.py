"""Sums over all rows of an optimizer step, for losses that read a figure of the whole step.

They are computed before the first backward pass, over all micro-batches and ranks: the loss of a row does not depend on
how its step is divided.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from training.batching.batches import Batch
from training.distributed import ranks
from training.task_types.task_type import StepSums, TaskType


@torch.no_grad()
def add_step_sums(task_type: TaskType, model: torch.nn.Module, batches: Sequence[Batch]) -> list[Batch]:
    """This rank's micro-batches of a step, on the model's device, with what the task type's loss reads of the step's
    sums; the same batches for task types that need none. Every rank calls it with its micro-batches.

    The passes are made in evaluation mode, so they draw no random numbers.
    """
    if not isinstance(task_type, StepSums):
        return list(batches)
    device, was_training = next(model.parameters()).device, model.training
    moved = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    model.eval()
    own = torch.stack([task_type.step_sums(model, batch).cpu() for batch in moved]).sum(dim=0)
    model.train(was_training)
    total = torch.tensor(ranks.all_gather(own.tolist()), dtype=torch.float64).sum(dim=0)
    return [task_type.with_step_sums(batch, total) for batch in moved]
