"""Losses of classification, by name or dotted path, and class weights.

A loss is a function of logits (B, L) float32 and labels (B,) int64. It returns a loss for each row, (B,), or their
mean, (). It must not return a sum: the engine weights each micro-batch by its rows, so that every row of an optimizer
step has the same weight, independent of micro-batches and ranks. It is called in training and in evaluation.

    import torch

    def hinge(logits, labels):
        return torch.nn.functional.multi_margin_loss(logits, labels, reduction="none")

Class weights multiply the rows' losses. They are scaled to a mean of 1 over the training rows, so only their ratios
matter. A batch's mean divides by its number of rows, not by the sum of their weights, so gradients do not depend on the
distribution of rare labels over batches.

B rows of one micro-batch on one rank, L labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from training.batching.batches import IGNORED
from training.jobs.user_code import CodeField
from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from training.recipe import Training
    from training.task_types.task_type import Loss

FOCAL_GAMMA = 2.0


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """(B,) the cross entropy of each row; `smoothing` is label_smoothing_factor."""
    return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def focal(logits: torch.Tensor, labels: torch.Tensor, gamma: float = FOCAL_GAMMA) -> torch.Tensor:
    """(B,) the cross entropy times (1 - p)^gamma, p the label's probability (Lin et al., arXiv:1708.02002)."""
    loss = cross_entropy(logits, labels)
    return (1 - torch.exp(-loss)).clamp(min=torch.finfo(loss.dtype).tiny) ** gamma * loss


def make_loss(
    training: Training, labels: Sequence[str], train_labels: npt.NDArray[np.int64], *, outside: bool
) -> Loss | None:
    """The loss that the recipe's training section selects, as the mean of a batch; None for the loss that the model
    computes itself, unless `outside`.

    `train_labels` (N,) are the indices of the training rows' labels. Raises UserError if the loss is not found, or if
    class_weights has an unknown label.
    """
    name, given_weights = training.loss, training.class_weights
    if name == "cross_entropy" and given_weights is None and not outside:
        return None
    if name == "cross_entropy":
        loss: Loss = partial(cross_entropy, smoothing=training.label_smoothing_factor)
    elif name == "focal":
        gamma = training.focal_gamma
        loss = partial(focal, gamma=FOCAL_GAMMA if gamma is None else gamma)
    else:
        loss = _PLACE.load(name)
    weights = None if given_weights is None else class_weights(given_weights, labels, train_labels)
    return _Mean(name, loss, weights)


def restrict_to_targets(loss: Loss) -> Loss:
    """The loss of the targets, given logits (B, T, L) and labels (B, T), IGNORED for tokens that are no targets; 0 if
    there are no targets."""

    def of_targets(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        is_target = labels != IGNORED
        chosen = logits[is_target]
        return loss(chosen, labels[is_target]) if len(chosen) else chosen.sum()

    return of_targets


def class_weights(
    requested: str | Mapping[str, float], labels: Sequence[str], train_labels: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """(L,) the weight of each label, with a mean of 1 over the training rows. Labels that are not named have the weight
    1 before scaling. Raises UserError for an unknown label."""
    rows = np.bincount(train_labels, minlength=len(labels))
    if isinstance(requested, str):  # balanced: the rows of each label have the same total weight
        # A label without training rows is weighted in the validation loss alone, there as the average training row.
        weights = np.where(rows > 0, 1 / np.maximum(rows, 1), (rows > 0).sum() / max(1, rows.sum()))
    else:
        if unknown := [name for name in requested if name not in labels]:
            known = ", ".join(labels[:20]) + (", …" if len(labels) > 20 else "")
            raise UserError(
                Problem(
                    kind="training",
                    where=f"training.class_weights.{name}",
                    message=f"the data has no such label: choose from {known}.{nearest(name, labels)}",
                )
                for name in unknown
            )
        weights = np.array([requested.get(label, 1.0) for label in labels])
    return np.asarray(weights * rows.sum() / (weights * rows).sum())


class _Mean:
    """The mean of a loss over a batch, with class weights."""

    def __init__(self, name: str, loss: Loss, weights: npt.NDArray[np.float64] | None) -> None:
        self._name, self._loss = name, loss
        self._weights = None if weights is None else torch.from_numpy(weights).float()

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self._loss(logits.float(), labels)
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else None
        if shape == () and self._weights is None:
            return found
        if shape != (len(labels),):
            given = type(found).__name__ if shape is None else f"a tensor of shape {shape}"
            why = ", or their mean" if self._weights is None else ", because training.class_weights weights rows"
            raise _PLACE.error(
                f"{self._name!r} returned {given} for {len(labels)} rows: it must return a loss for each row{why}."
            )
        if self._weights is not None:
            self._weights = self._weights.to(labels.device)
            found = found * self._weights[labels]
        return found.mean()


def _takes_two(found: Any) -> bool:
    try:
        inspect.signature(found).bind(None, None)
    except (TypeError, ValueError):
        return False
    return callable(found) and not isinstance(found, type)


_PLACE = CodeField(
    kind="training",
    where="training.loss",
    example="my_losses:hinge",
    accepted="a function of logits (B, L) and labels (B,)",
    accepts=_takes_two,
)
