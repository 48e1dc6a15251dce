"""Collators: the task type's, and the user's for training batches, each with random numbers of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from training.batching.random_states import SeededBatch, seed_generators
from training.jobs.user_code import CodeField
from training.task_types.task_type import TaskType

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
