"""The task types, each one file: a class of training.task_types.task_type.TaskType, by name, or one of the recipe's
author as `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from training.recipe.tables.task_types import TASK_TYPES
from training.recipe.task_specification import code_modules, specification, specification_class, user_code
from training.task_types.task_type import TaskType

__all__ = ["TASK_TYPES", "class_of", "code_modules", "from_settings", "has_baseline", "load", "user_code"]


def load(task: str, options: Mapping[str, Any] | None = None) -> TaskType:
    """The task type of this name, or the author's, with these options. Raises UserError if there is none, or it has no
    such options."""
    return cast(TaskType, specification(task, options))


def class_of(name: str) -> type[TaskType]:
    """The class of a task type. Raises UserError as `load` does."""
    return cast(type[TaskType], specification_class(name))


def from_settings(settings: Mapping[str, Any]) -> TaskType:
    """The task type of a job's settings: `task`, and `options` if there are any."""
    return load(settings["task"], settings.get("options"))


def has_baseline(name: str) -> bool:
    """Whether the task type has constant answers; a first model must beat the best of them."""
    return class_of(name).baseline is not TaskType.baseline
