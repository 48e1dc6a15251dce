"""The task types, one file each: a subclass of training.task_types.task_type.TaskType, found by its name, or a class
of the user's, found as `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from training.recipe.tables.task_types import TASK_TYPES
from training.recipe.task_specification import (
    code_modules,
    metric_modules,
    specification,
    specification_class,
    user_code,
)
from training.task_types.task_type import Calibrated, TaskType

__all__ = [
    "TASK_TYPES",
    "calibrates",
    "class_of",
    "code_modules",
    "from_settings",
    "has_baseline",
    "load",
    "metric_modules",
    "user_code",
]


def load(task: str, options: Mapping[str, Any] | None = None) -> TaskType:
    """The task type of this name with these options. Raises UserError if the name or an option is unknown."""
    return cast(TaskType, specification(task, options))


def class_of(name: str) -> type[TaskType]:
    """The class of a task type. Raises UserError as `load` does."""
    return cast(type[TaskType], specification_class(name))


def from_settings(settings: Mapping[str, Any]) -> TaskType:
    """The task type of a job's settings `task` and, optionally, `options`."""
    return load(settings["task"], settings.get("options"))


def has_baseline(name: str) -> bool:
    """Whether the task type has a baseline, such as constant predictions, which a first model must beat."""
    return class_of(name).baseline is not TaskType.baseline


def calibrates(task_type: TaskType) -> bool:
    """Whether the config of an exported model has values that are computed from the predictions of validation rows."""
    return isinstance(task_type, Calibrated) and task_type.is_calibrated
