"""The cost of a teacher's outputs before they are computed, for `finetune plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.cache import store
from tasks.cache.history import History
from tasks.cache.results import Artifact, Lock
from tasks.reports.formatting import format_count, format_size
from training.models.repository_files import dimensions_of_config, read_json
from training.programs.loaded_teacher import TeacherResult
from training.recipe import Recipe
from training.recipe.task_specification import specification_class

BYTES_A_NUMBER = 4
LEAST_TIMED_ROWS = 256
"""Fewer rows tell little of the speed."""


def teacher_line(name: str, recipe: Recipe, lock: Lock, data: Any, unlabelled: Any) -> str:
    """Rows, seconds at the speed of the last run, memory of the weights, and disk, as far as they are known."""
    weights = _weight_bytes(lock)
    parts = [f"by {name}"]
    parts.append(f"its weights take {format_size(weights)} of memory" if weights else "its weights are unknown yet")
    rate = _last_rate(recipe)
    if not isinstance(data, Artifact):
        return ", ".join([*parts, "rows, time and disk: ?, until the rows are loaded"])
    rows = data.result.train_rows or 0
    rows += unlabelled.result.rows if isinstance(unlabelled, Artifact) else 0
    parts.append(f"{format_count(rows, 'row')} at most: rows of blocks that are stored cost nothing")
    parts.append(f"about {rows / rate:,.0f} s at the {rate:,.0f} rows/s of the last run" if rate else "time: ?")
    return ", ".join([*parts, _disk(recipe, lock, data.result.labels, rows)])


def _disk(recipe: Recipe, lock: Lock, labels: int, rows: int) -> str:
    """The size of the outputs."""
    teacher, a_row = recipe.training.teacher, BYTES_A_NUMBER * max(1, labels)
    assert teacher is not None
    if teacher.writes_targets:
        return "texts on disk"
    outputs = specification_class(recipe.task).teacher_outputs
    if outputs == "vectors":
        dimensions = dimensions_of_config(read_json(config)) if (config := _find_config(lock)) else None
        return f"{BYTES_A_NUMBER * dimensions:,} bytes a text on disk" if dimensions else "vectors on disk"
    if outputs == "tokens":
        return f"{BYTES_A_NUMBER * (2 * teacher.top_k + 1):,} bytes a target on disk"
    if recipe.task == "token-classification":
        return f"{a_row:,} bytes a word on disk"
    return f"{format_size(a_row * rows)} on disk, {a_row:,} bytes a row"


def _last_rate(recipe: Recipe) -> float | None:
    """The rows a second of this recipe's last outputs, if enough rows of them were computed."""
    key = History(recipe.name).last_key("teacher_outputs")
    found = store.manifest_of("teacher_outputs", key) if key else None
    try:
        result = TeacherResult.model_validate(found and found[0].result)
    except ValidationError:  # there is none, or it is of another version of this project
        return None
    return result.rows_per_second or None if result.computed >= LEAST_TIMED_ROWS else None


def _weight_bytes(lock: Lock) -> int | None:
    """The size of the teacher's weights, if its files are here."""
    if lock.teacher_files:
        return sum(pin.size_bytes or 0 for name, pin in lock.teacher_files.items() if name.endswith(".safetensors"))
    if (config := _find_config(lock)) is None:
        return None
    return sum(file.stat().st_size for file in config.parent.glob("*.safetensors"))


def _find_config(lock: Lock) -> Path | None:
    """The teacher's config.json, if it is here."""
    if lock.teacher_files:
        return Path(lock.teacher_files["config.json"].path)
    if lock.teacher_version is None or lock.teacher_version.key is None:
        return None
    try:
        trained = store.find("fit", lock.teacher_version.key)
    except store.Damaged:
        return None
    return None if trained is None else trained.path / "model" / "config.json"
