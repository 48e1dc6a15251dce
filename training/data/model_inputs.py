"""The inputs of rows to predict, with the types that load_data stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    from training.recipe.column_types import Column, Mask

Values = tuple[Any, ...]
"""The model's inputs of a row."""


class TaskColumns(Protocol):
    """The part of a task type that rows to predict depend on: see training.task_types.task_type."""

    @property
    def columns(self) -> Mapping[str, Column]: ...

    def faults_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]: ...


def to_batch(task_type: TaskColumns, names: Iterable[str], rows: Sequence[Values]) -> pa.RecordBatch:
    """The rows as a record batch. `names` are the task type's columns."""
    stored = {"number": pa.float64(), "texts": pa.list_(pa.string())}
    types = {name: stored.get(task_type.columns[name].form, pa.string()) for name in names}
    columns = [pa.array([row[place] for row in rows], type_) for place, type_ in enumerate(types.values())]
    return pa.RecordBatch.from_arrays(columns, names=[*types])
