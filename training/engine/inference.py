"""Every row of a split given to a model once, by all processes together: what it answers, and its loss.

For both engines while they train, and for the programs that predict afterwards. Which rows make a batch does not hang
on the number of processes: one gives the same as several, given as many threads each.
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
from training.models.loading import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.batching.batches import TokenRows
    from training.engine.collation import Collate
    from training.task_types.task_type import TaskType

Answer = Callable[[Batch], tuple[torch.Tensor | None, int, pa.RecordBatch]]
"""Of a batch of B rows its mean loss, (), and of how many targets that is the mean, where it is asked for; and what the
model answers, a line a row."""


@dataclass(frozen=True)
class Evaluated:
    """What came of the rows of a split."""

    loss: float
    """The mean over all targets; nan where nobody computed it."""
    answers: pa.Table
    """A line a row, in the order of the rows, on rank 0; what the others hold is of no use."""


def evaluate(
    batches: Iterable[Batch],
    plan: EvaluationBatches,
    answer: Answer,
    tell: Callable[[int], None] = lambda done: None,
) -> Evaluated:
    """Has all of them answered; every rank calls it with the batches of its plan.

    `tell` hears how many rows are done, about.
    """
    found, losses = [], []
    for number, batch in enumerate(batches):
        loss, targets, answers = answer(batch)
        if number < plan.own:  # those beyond only keep the others company
            found.append(answers)
            losses.append((math.nan if loss is None else float(loss), targets))
        tell(plan.done(number + 1))
    shares = ranks.to_first((found, losses))
    of_batches = np.zeros((plan.batches, 2))  # in their order, so that the sum does not hang on the ranks
    for place, (_, of_share) in enumerate(shares):
        of_batches[place :: len(shares)] = np.reshape(of_share, (-1, 2))  # a rank may have none
    of_batches = of_batches[of_batches[:, 1] > 0]  # the mean over nothing is no number
    mean = float(of_batches.prod(axis=1).sum() / max(of_batches[:, 1].sum(), 1))
    if not shares:
        return Evaluated(ranks.from_first(mean), pa.table({}))
    everything = pa.Table.from_batches([one for of_share, _ in shares for one in of_share])
    return Evaluated(ranks.from_first(mean), everything.take(np.argsort(plan.order_of_shares())))


def predict(
    task_type: TaskType,
    network: PreTrainedModel,
    rows: TokenRows,
    collate: Collate,
    batch_size: int,
    mixed_precision: str,
    tell: Callable[[int], None] = lambda done: None,
) -> pa.Table:
    """The task type's answers and `label`, row by row as the data has them.

    Every rank calls it, and rank 0 alone gets them. `tell` hears on rank 0 how many are done.
    """
    plan = EvaluationBatches(rows.lengths, batch_size, world=ranks.joined(), rank=ranks.place())
    dtype = DTYPES[mixed_precision]

    def answer(batch: Batch) -> tuple[None, int, pa.RecordBatch]:
        inputs = {name: tensor.to(network.device) for name, tensor in batch.items()}
        return None, 1, task_type.predictions(network, task_type.forward(network, inputs), inputs)

    with torch.inference_mode(), torch.autocast(network.device.type, dtype, enabled=mixed_precision != "no"):
        batches = (collate([rows[number] for number in numbers]) for numbers in plan)
        answers = evaluate(batches, plan, answer, tell if ranks.place() == 0 else lambda done: None).answers
    return answers if ranks.place() else task_type.join_labels(answers, rows)
