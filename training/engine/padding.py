"""Whether the padding of a batch changes the predictions for its rows.

A model that reads padding gives a row other predictions in other batches. The figures of such a model are wrong, and
nothing else notices it: a head that takes the last token reads padding if the tokenizer pads on the right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from training.batching.random_states import seed_generators
from training.problems import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.batching.batches import TokenRows
    from training.engine.collation import Collate
    from training.task_types.task_type import TaskType

SEARCHED_ROWS = 1000
"""The first rows, of which two of unequal length are compared."""
NOTICED, TOLERATED, TOLERATED_IN_FEWER_BITS = 1e-3, 0.02, 0.1
"""Differences, as a share of the largest value, above which padding is warned of and refused. In 32-bit floats, models
that ignore padding differ by less than 1e-6."""


def require_same_predictions(
    task_type: TaskType,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: TokenRows,
    collate: Collate,
    warn: Callable[[str], None],
) -> None:
    """Raises UserError if the model predicts something else for a short row alone than in a batch with a longer row,
    and warns if it differs little."""
    pair = _unequal_rows(rows)
    if pair is None:
        return
    exact = not torch.is_autocast_enabled(model.device.type) and model.dtype == torch.float32
    training = model.training
    # Drawing numbers here would change the training.
    with torch.no_grad(), seed_generators([0]):
        try:
            model.eval()
            alone, together = (
                _numbers(task_type, model, collate(rows.__getitems__(some))) for some in (pair[:1], pair)
            )
        finally:
            model.train(training)
    scale = max(np.abs(alone).max(initial=0), np.abs(together).max(initial=0), 1e-9)
    difference = float(np.abs(alone - together).max(initial=0) / scale) if alone.shape == together.shape else 1.0
    side = tokenizer.padding_side
    message = (
        f"{side!r} makes the predictions of {type(model).__name__} depend on the other rows of a batch: alone and "
        f"padded, those for one row differ by {difference:.1%}"
    )
    if not difference <= (TOLERATED if exact else TOLERATED_IN_FEWER_BITS):
        message += (
            f", so all figures would be wrong. Set padding_side to {'left' if side == 'right' else 'right'!r} in "
        )
        message += "tokenizer_config.json of the model; if that does not help, choose another model."
        raise UserError.of("model", "tokenizer.padding_side", message)
    if exact and difference > NOTICED:
        warn(f"tokenizer.padding_side: {message}.")


def _unequal_rows(rows: TokenRows) -> list[int] | None:
    """A short row and a longer one; None if all have the same length."""
    lengths = rows.lengths[:SEARCHED_ROWS]
    if not len(lengths) or lengths.min() == lengths.max():
        return None
    short = int(lengths.argmin())
    longer = np.where(lengths >= min(lengths[short] + 4, lengths.max()), lengths, np.iinfo(lengths.dtype).max)
    return [short, int(longer.argmin())]


def _numbers(task_type: TaskType, model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Any:
    """The floating-point numbers of the predictions for the first row of a batch."""
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    predictions = task_type.predictions(model, task_type.forward(model, batch), batch).slice(0, 1)
    found = [np.zeros(0)]
    for column in predictions.columns:
        while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
            column = column.flatten()
        if pa.types.is_floating(column.type):
            found.append(column.to_numpy(zero_copy_only=False).astype(np.float64))
    return np.concatenate(found)
