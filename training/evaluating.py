"""Every row of a split given to a model once, by all processes together: what it answers, and its loss.

For both engines while they train, and for the programs that predict afterwards. Which rows make a batch does not hang
on the number of processes: one gives the same as several, given as many threads each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from training import ranks
from training.batching import EvaluationBatches

Batch = dict[str, torch.Tensor]
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
    of_batches = np.full((plan.batches, 2), math.nan)  # in their order, so that the sum does not hang on the ranks
    for place, (_, of_share) in enumerate(shares):
        of_batches[place :: len(shares)] = np.reshape(of_share, (-1, 2))  # also where a rank has no batch of its own
    mean = float(of_batches.prod(axis=1).sum() / of_batches[:, 1].sum())
    if not shares:
        return Evaluated(ranks.from_first(mean), pa.table({}))
    everything = pa.Table.from_batches([one for of_share, _ in shares for one in of_share])
    return Evaluated(ranks.from_first(mean), everything.take(np.argsort(plan.order_of_shares())))
