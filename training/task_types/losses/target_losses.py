"""Losses of single targets, by name or dotted path, with label smoothing and class weights.

A task type cuts the logits and labels of a batch into those of its targets: rows, words, labels of rows, tokens, or
numbers. By the form of the targets, a loss is called with

    classes, places, tokens   logits (W, L) float32 and labels (W,) int64; a logit is -inf where there is no such place
    labels, binary            logits (B, L) float32 and labels (B, L) float32, 0 or 1
    numbers                   logits (B,) float32 and labels (B,) float32

It returns the loss of each target, of the shape of the labels; or of each row, (W,); or their mean, (). It must not
return a sum: the engine weights each micro-batch by its targets, so that every target of an optimizer step has the same
weight, independent of micro-batches and ranks. It is called in training and in evaluation.

    import torch

    def hinge(logits, labels):
        return torch.nn.functional.multi_margin_loss(logits, labels, reduction="none")

Class weights multiply the losses of targets. Those of classes are scaled to a mean of 1 over the training targets, so
only their ratios matter. Those of labels multiply the targets that are 1, as pos_weight of torch's BCEWithLogitsLoss. A
batch's mean divides by its number of targets, not by the sum of their weights, so gradients do not depend on the
distribution of rare labels over batches.

B rows of one micro-batch on one rank, W targets, L labels, classes, places or tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from training.batching.batches import IGNORED
from training.jobs.user_code import CodeField, is_function_of
from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from training.recipe import Training
    from training.task_types.task_type import Loss

FOCAL_GAMMA = 2.0


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """(W,) the cross entropy of each target; `smoothing` is label_smoothing_factor."""
    return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def cross_entropy_of_places(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """(W,) the cross entropy of each target. A logit of -inf is no place, and smoothing leaves it out."""
    loss = functional.cross_entropy(logits, labels, reduction="none")
    if not smoothing:
        return loss
    missing = logits == -torch.inf
    spread = -logits.log_softmax(dim=-1).masked_fill(missing, 0.0).sum(dim=-1) / (~missing).sum(dim=-1)
    return (1 - smoothing) * loss + smoothing * spread


def binary_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """(B, L) the binary cross entropy of each label; smoothing spreads over its two outcomes."""
    truths = labels * (1 - smoothing) + smoothing / 2 if smoothing else labels
    return functional.binary_cross_entropy_with_logits(logits, truths, reduction="none")


def squared_error(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(B,)"""
    return functional.mse_loss(logits, labels, reduction="none")


def focal(usual: Loss, gamma: float, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The usual loss of each target times (1 - p)^gamma, p the probability of its label, whose negative logarithm the
    loss is (Lin et al., arXiv:1708.02002)."""
    loss = usual(logits, labels)
    return (1 - torch.exp(-loss)).clamp(min=torch.finfo(loss.dtype).tiny) ** gamma * loss


USUAL: dict[str, Callable[..., torch.Tensor]] = {
    "classes": cross_entropy,
    "tokens": cross_entropy,
    "places": cross_entropy_of_places,
    "labels": binary_cross_entropy,
    "binary": binary_cross_entropy,
    "numbers": squared_error,
}
"""The loss of each target by `target_form` of a task type."""


def make_loss(
    form: str,
    training: Training,
    labels: Sequence[str],
    count: Callable[[], tuple[npt.NDArray[np.int64], int]],
    select: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Loss:
    """The loss that the recipe's training section selects, as the mean of the targets of a batch; 0 if there are none.

    `form` is the task type's `target_form`. `count` gives the training targets that have each label, (L,), and the
    number of rows or words. `select` cuts the logits and labels of a batch into those of targets. Raises UserError if
    the loss is not found, or if class_weights has an unknown label.
    """
    name, smoothing, gamma = training.loss, training.label_smoothing_factor, training.focal_gamma
    usual = USUAL[form]
    if name == "cross_entropy":
        loss: Loss = partial(usual, smoothing=smoothing) if smoothing else usual
    elif name == "focal":
        loss = partial(focal, usual, FOCAL_GAMMA if gamma is None else gamma)
    else:
        loss = _PLACE.load(name)
    if training.class_weights is None:
        return TargetLoss(name, loss, select)
    counts, targets = count()
    if form == "labels":
        return TargetLoss(
            name, loss, select, _of_positive, positive_weights(training.class_weights, labels, counts, targets)
        )
    return TargetLoss(name, loss, select, _of_class, class_weights(training.class_weights, labels, counts))


def select_targets(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits (W, L) and labels (W,) of the targets, of logits (B, T, L) and labels (B, T), IGNORED for tokens that
    are no targets."""
    is_target = labels != IGNORED
    return logits[is_target], labels[is_target]


def class_weights(
    requested: str | Mapping[str, float], labels: Sequence[str], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """(L,) the weight of each label, scaled to a mean of 1 over the training targets. (L,) `counts` says how many of
    them have each label. Labels without a name in `requested` weigh 1 before the scaling. Raises UserError for an
    unknown label."""
    if isinstance(requested, str):  # balanced: the targets of each label have the same total weight
        # A label without training targets is weighted in the validation loss alone, there as the average one.
        weights = np.where(counts > 0, 1 / np.maximum(counts, 1), (counts > 0).sum() / max(1, counts.sum()))
    else:
        weights = _named_weights(requested, labels)
    return np.asarray(weights * counts.sum() / (weights * counts).sum())


def positive_weights(
    requested: str | Mapping[str, float], labels: Sequence[str], counts: npt.NDArray[np.int64], rows: int
) -> npt.NDArray[np.float64]:
    """(L,) the weight of the rows that have each label, those without it having 1; (L,) `counts` of the training rows
    have it. Balanced, both weigh the same, unless there is only one of them. Raises UserError for an unknown label."""
    if not isinstance(requested, str):
        return _named_weights(requested, labels)
    has_both = (counts > 0) & (counts < rows)
    return np.where(has_both, (rows - counts) / np.maximum(counts, 1), 1.0)


def _named_weights(requested: Mapping[str, float], labels: Sequence[str]) -> npt.NDArray[np.float64]:
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
    return np.array([requested.get(label, 1.0) for label in labels])


def _of_class(weights: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(W,) the weights of targets with these classes."""
    return weights[labels]


def _of_positive(weights: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(B, L) the weights of the labels that rows have, and 1."""
    return torch.where(labels > 0, weights, 1.0)


class TargetLoss:
    """The mean loss of the targets of a batch, (), with class weights; 0 without targets."""

    def __init__(
        self,
        name: str,
        loss: Loss,
        select: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        weigh: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        weights: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self._name, self._loss, self._select, self._weigh = name, loss, select, weigh
        self._weights = None if weights is None else torch.from_numpy(weights).float()

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, labels = self._select(logits, labels)
        if not len(logits):
            return logits.sum()
        found = self._loss(logits.float(), labels)
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else None
        if self._weigh is None and shape == ():
            return found
        expected = tuple(labels.shape)
        if shape != expected and (self._weigh is not None or shape != expected[:1]):
            raise _PLACE.error(self._wrong_shape(shape, found, logits, labels))
        if self._weigh is not None and self._weights is not None:
            self._weights = self._weights.to(labels.device)
            found = found * self._weigh(self._weights, labels)
        return found.mean()

    def _wrong_shape(
        self, shape: tuple[int, ...] | None, found: Any, logits: torch.Tensor, labels: torch.Tensor
    ) -> str:
        given = type(found).__name__ if shape is None else f"a tensor of shape {shape}"
        expected = str(tuple(labels.shape))
        if self._weigh is not None:
            why = f"{expected}, because training.class_weights weights them"
        else:
            why = f"{expected}, or their mean"
        message = f"{self._name!r} returned {given} for logits {tuple(logits.shape)} and labels {expected}: "
        return f"{message}it must return a loss for each label, {why}."


_PLACE = CodeField(
    kind="training",
    where="training.loss",
    example="my_losses:hinge",
    accepted="a function of logits and labels",
    accepts=is_function_of(2),
)
