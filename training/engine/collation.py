"""Batches of an engine: the collator, which makes them; the check that their padding changes no predictions; and the
preparation of an optimizer step, for losses of all of its rows together.

A model that reads padding gives a row other predictions in other batches. The metrics of such a model are wrong, and
nothing else notices it: a head that takes the last token reads padding if the tokenizer pads on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from training.batching.batches import Batch, TokenRows
from training.batching.random_states import SeededBatch, seed_generators
from training.distributed import ranks
from training.jobs.user_code import CodeField
from training.problems import UserError
from training.task_types.task_type import TaskType, WholeStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Collate = Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]


class TrainingCollator:
    """The user's collator for training batches, each with random numbers of its own; the task type's for others, so
    that evaluations and later predictions use the same batches.

    Raises UserError if the user's returns another number of rows than it was given.
    """

    def __init__(self, users: Collate, task_types: Collate) -> None:
        self._users, self._task_types = users, task_types

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if not isinstance(features, SeededBatch):
            return self._task_types(features)
        with seed_generators(features.seeds):
            batch = self._users(list(features))
        try:
            rows = len(batch["labels"])
        except (TypeError, KeyError):
            raise FIELD.error(
                f"it returned {type(batch).__name__} without 'labels': it must return tensors by name."
            ) from None
        if rows != len(features):
            raise FIELD.error(f"it returned {rows} rows for {len(features)}: each row must be returned once.")
        return batch


def collator(name: str | None, task_type: TaskType, *settings: Any) -> Collate:
    """The task type's collator, or the one that `training.collator` names, both made with the same `settings`: the
    tokenizer and the multiple to pad to.

    A collator is a function of a list of features that returns tensors by name, `labels` among them, a line a row.
    Raises UserError if the name is not found.
    """
    own: Collate = task_type.collator(*settings)
    if name is None:
        return own
    users = FIELD.load(name)(*settings)
    if not callable(users):
        raise FIELD.error(f"{name!r} returned {type(users).__name__}: it must return a function of a batch's features.")
    return TrainingCollator(users, own)


FIELD = CodeField(
    kind="training",
    where="training.collator",
    example="my_batches:Masked",
    accepted="a function or class that is called with a tokenizer and a multiple to pad to",
    accepts=callable,
)


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
            "tokenizer_config.json of the model; if that does not help, choose another model."
        )
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


def prepare_step(task_type: TaskType, model: torch.nn.Module, batches: Sequence[Batch]) -> list[Batch]:
    """This rank's micro-batches of an optimizer step, as its loss reads them; the same batches for task types whose
    loss depends on single rows. Every rank calls it with its micro-batches, before the first backward pass."""
    if not isinstance(task_type, WholeStep):
        return list(batches)
    device = next(model.parameters()).device
    moved = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    return task_type.prepare_step(model, moved, ranks.all_gather)
