"""Collators of the recipe's author: the batches of training, each with random numbers of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from training.batching.random_states import Numbered, generators_from
from training.jobs.user_code import Place
from training.task_types.task_type import TaskType

Collate = Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]


class TrainingCollator:
    """The user's collator for the batches of training, each with random numbers of its own; the task type's for others.

    So that what is evaluated while training is what is predicted afterwards. Raises UserError where the user's gives
    another number of rows than it was given.
    """

    def __init__(self, asked: Collate, own: Collate) -> None:
        self._asked, self._own = asked, own

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if not isinstance(features, Numbered):
            return self._own(features)
        with generators_from(features.draws_from):
            batch = self._asked(list(features))
        try:
            rows = len(batch["labels"])
        except (TypeError, KeyError):
            raise PLACE.refused(
                f"it gave {type(batch).__name__} without 'labels': it must give tensors by name."
            ) from None
        if rows != len(features):
            raise PLACE.refused(f"it gave {rows} rows for {len(features)}: each row must come out once.")
        return batch


def collator(name: str | None, task_type: TaskType, *settings: Any) -> Collate:
    """What makes batches: the task type's own, or what `training.collator` names, both made with the same `settings`:
    the tokenizer and the multiple to pad to.

    It is a function of a list of features that gives tensors by name, `labels` among them, a line a row. Raises
    UserError where there is none of that name.
    """
    own: Collate = task_type.collator(*settings)
    if name is None:
        return own
    made = PLACE.load(name)(*settings)
    if not callable(made):
        raise PLACE.refused(f"{name!r} gave {type(made).__name__}: it must give a function of a batch's features.")
    return TrainingCollator(made, own)


PLACE = Place(
    kind="training",
    where="training.collator",
    example="my_batches:Masked",
    accepted="a function or class that is called with a tokenizer and a multiple to pad to",
    fits=callable,
)
