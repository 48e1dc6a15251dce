"""Inference on a split: predictions and loss of each row, computed once over all processes.

Both engines use it for evaluations, and the programs that predict. The rows of a batch do not depend on the number of
processes: one process computes the same as several, with as many threads each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from training.batching.batches import Batch, EvaluationBatches
from training.distributed import ranks
from training.models.loading import autocast

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import TokenRows
    from training.engine.collation import Collate
    from training.task_types.task_type import TaskType

PredictBatch = Callable[[Batch], tuple[torch.Tensor | None, int, pa.RecordBatch]]
"""For a batch of B rows: its mean loss, () or None, the number of targets of that mean, and the predictions by row."""


@dataclass(frozen=True)
class Evaluated:
    """Loss and predictions of a split."""

    loss: float
    """The mean over all targets; nan if it was not computed."""
    predictions: pa.Table
    """A line a row, in the order of the rows, on rank 0; meaningless on the others."""


def evaluate(
    batches: Iterable[Batch],
    plan: EvaluationBatches,
    predict_batch: PredictBatch,
    report: Callable[[int], None] = lambda done: None,
) -> Evaluated:
    """Predicts all batches; every rank calls it with the batches of its plan.

    `report` is called with the approximate number of rows that are done.
    """
    found, losses = [], []
    for number, batch in enumerate(batches):
        loss, targets, predictions = predict_batch(batch)
        if number < plan.own:  # further ones only keep the ranks in step
            found.append(predictions)
            losses.append((math.nan if loss is None else float(loss), targets))
        report(plan.done(number + 1))
    shares = ranks.gather((found, losses))
    of_batches = np.zeros((plan.batches, 2))  # in batch order, so that the sum does not depend on the ranks
    for place, (_, of_share) in enumerate(shares):
        of_batches[place :: len(shares)] = np.reshape(of_share, (-1, 2))  # a rank may have none
    of_batches = of_batches[of_batches[:, 1] > 0]  # the mean over no target is nan
    mean = float(of_batches.prod(axis=1).sum() / max(of_batches[:, 1].sum(), 1))
    if not shares:
        return Evaluated(ranks.broadcast(mean), pa.table({}))
    everything = pa.Table.from_batches([batch for of_share, _ in shares for batch in of_share])
    return Evaluated(ranks.broadcast(mean), everything.take(np.argsort(plan.order_of_shares())))


def predict(
    task_type: TaskType,
    network: PreTrainedModel,
    rows: TokenRows,
    collate: Collate,
    batch_size: int,
    mixed_precision: str,
    report: Callable[[int], None] = lambda done: None,
) -> pa.Table:
    """The task type's predictions and `label`, row by row in the order of the data.

    Every rank calls it, and rank 0 alone gets them. `report` is called on rank 0 with the number of rows that are done.
    """
    predictions = compute(task_type, network, rows, collate, batch_size, mixed_precision, task_type.predictions, report)
    return predictions if ranks.rank() else task_type.join_labels(predictions, rows)


def compute(
    task_type: TaskType,
    network: PreTrainedModel,
    rows: TokenRows,
    collate: Collate,
    batch_size: int,
    mixed_precision: str,
    read: Callable[[PreTrainedModel, ModelOutput, Batch], pa.RecordBatch],
    report: Callable[[int], None] = lambda done: None,
) -> pa.Table:
    """What `read` takes of the model's outputs for each batch, by feature row, as `predict` does."""
    plan = EvaluationBatches(rows.lengths, batch_size, world=ranks.world_size(), rank=ranks.rank())

    def predict_batch(batch: Batch) -> tuple[None, int, pa.RecordBatch]:
        inputs = {name: tensor.to(network.device) for name, tensor in batch.items()}
        return None, 1, read(network, task_type.forward(network, inputs), inputs)

    # Not inference_mode, in which autocast casts each weight again for every batch.
    with torch.no_grad(), autocast(network.device, mixed_precision):
        batches = (collate([rows[number] for number in numbers]) for numbers in plan)
        return evaluate(batches, plan, predict_batch, report if ranks.rank() == 0 else lambda done: None).predictions
