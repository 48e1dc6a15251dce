"""Task types whose loss is the mean over targets, so that a recipe can choose it: training.loss, focal_gamma,
class_weights and label_smoothing_factor.

The module imports no torch at its top level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from training.task_types.task_type import TaskType

if TYPE_CHECKING:
    import torch

    from training.batching.batches import TokenRows
    from training.recipe import Training
    from training.task_types.task_type import Loss


class HasTargets(TaskType):
    """A loss of single targets, by the recipe: a task type with a `target_form`."""

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """The recipe's loss of each target, with the weights of labels. Raises UserError if it is not found, or if
        class_weights has an unknown label."""
        from training.task_types.losses.target_losses import make_loss

        assert self.target_form is not None
        return make_loss(
            self.target_form, training, labels, lambda: self.label_counts(train, len(labels)), self.targets
        )

    def targets(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits and the labels of a batch's targets, as training.task_types.losses.target_losses lists them by
        their form. By default each row is a target."""
        return logits, labels

    def label_counts(self, train: TokenRows, size: int) -> tuple[npt.NDArray[np.int64], int]:
        """For class_weights: the number of training targets that have each of `size` labels, (L,), and the number of
        rows or words."""
        return np.bincount(train.labels, minlength=size), len(train.labels)


def chooses_loss(training: Training) -> bool:
    """Whether the recipe sets another loss than the task type's usual one."""
    is_usual = training.loss == "cross_entropy" and training.class_weights is None
    return not is_usual or training.label_smoothing_factor > 0
