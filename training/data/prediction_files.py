"""Files of predictions: Parquet, CSV, JSON lines, or the output file of OpenAI's batches.

A row has the columns that travel along, the task type's columns of `TaskType.record_types` (null for a row with an
error; CSV has none that are lists or objects), and those of STAMPS. A predicted column whose name travels along is
called `predicted_NAME`.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from training.data.arrow_columns import as_json, decoded
from training.data.batch_requests import ID, BatchAnswer, response
from training.data.casting import Values
from training.data.csv_files import FORMULA
from training.data.prediction_rows import ColumnValues, Rows
from training.data.row_problems import RowProblem
from training.data.vectors import VectorType, as_vectors, parquet_options
from training.jobs.protocol import without_nan
from training.recipe.tables.formats import FORMATS

SUFFIXES = {"parquet": ".parquet", "csv": ".csv", "jsonl": ".jsonl", "openai": ".jsonl"}
"""The formats of predictions, with the suffix of their files."""
WRITTEN = {
    suffix: "jsonl" if name == "json" else name for name, source in FORMATS.items() for suffix in source.predicted
}
"""The suffixes of single files of predictions, with their formats."""
GENERATED = "generated_text"
"""The predicted column that is an assistant's answer."""
EMBEDDING = "embedding"
"""The predicted column that is the embedding of a text."""

STAMPS = {
    "error": pa.string(),
    "model": pa.string(),
    "version": pa.string(),
    "model_digest": pa.string(),
    "predicted_at": pa.timestamp("ms", "UTC"),
    "input_file": pa.string(),
    "input_row": pa.int64(),
}
"""The columns that every row has: its error, the model that predicted it and when, and its place in the input."""


@dataclass(frozen=True)
class Stamp:
    """The model behind the predictions of some rows, and their file."""

    model: str
    version: str
    model_digest: str
    predicted_at_s: int
    """Unix time."""
    input_file: str


@dataclass(frozen=True)
class KeptColumns:
    """The types of the columns that travel along, found by reading all rows."""

    merged: Mapping[str, pa.DataType] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)
    """The largest absolute value of the whole numbers in a column."""

    def seen(self, rows: Rows) -> KeptColumns:
        """The types that hold these rows too."""
        found = {name: _merge(self.merged.get(name, pa.null()), _type_of(column)) for name, column in rows.kept.items()}
        largest = {name: max(self.largest.get(name, 0), _largest(column)) for name, column in rows.kept.items()}
        return KeptColumns({**self.merged, **found}, {**self.largest, **largest})

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The type of each column: one that holds the values of all files exactly."""
        most = {pa.float64(): 2**53, pa.int64(): 2**63 - 1}
        return {
            name: pa.string() if self.largest.get(name, 0) > most.get(kind, math.inf) else kind
            for name, kind in self.merged.items()
        }

    def described(self) -> dict[str, str]:
        """The types as texts."""
        return {name: str(kind) for name, kind in self.types.items()}


_UNREAD = "has tokens that the model does not have, or is refused by its chat template: the warnings say which"


def plain_message(values: Values, text: str) -> dict[str, Any]:
    """The assistant's message with this text."""
    return {"role": "assistant", "content": text}


class Writer:
    """Writes rows with their predictions into a file. Closing it syncs the file to disk.

    Args:
        file: to write.
        form: one of SUFFIXES.
        kept: the columns that travel along.
        delimiter: of a CSV file.
        escape_formulas: in a CSV file, see BatchPrediction.
        as_message: makes the message of a response, of a row's values and the generated text.
        embedding_type: of embeddings in Parquet, see BatchPrediction.
    """

    def __init__(
        self,
        file: Path,
        form: str,
        kept: KeptColumns,
        delimiter: str = ",",
        escape_formulas: bool = False,
        as_message: Callable[[Values, str], Mapping[str, Any]] = plain_message,
        embedding_type: VectorType = "float32",
    ) -> None:
        self._file, self._form, self._kept, self._delimiter = file, form, kept, delimiter
        self._escape_formulas, self._as_message = escape_formulas, as_message
        self._embedding_type = embedding_type
        self._dimensions: int | None = None
        """Of embeddings in Parquet; known from the first one on."""
        self._waiting = list[tuple[Rows, pa.Table, Stamp]]()
        """Rows without an embedding before it."""
        self._stack = ExitStack()
        self._out: Any = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._waiting and error[0] is None:
            self._begin_embeddings(1)
        self._stack.close()
        if error[0] is None:
            with self._file.open("rb") as file:
                os.fsync(file.fileno())

    def write(self, rows: Rows, predictions: pa.Table, stamp: Stamp) -> None:
        """Appends rows; `predictions` has a line for each of them that is usable, empty if the model could not read its
        tokens."""
        if self._form == "parquet" and EMBEDDING in predictions.column_names and self._dimensions is None:
            dimensions = pc.max(pc.list_value_length(predictions[EMBEDDING])).as_py()
            if dimensions is None:
                self._waiting.append((rows, predictions, stamp))
                return
            self._begin_embeddings(dimensions)
        is_empty = np.all([column.is_null().to_numpy() for column in predictions.columns], axis=0).tolist()
        places, place = [], 0
        for error in rows.errors:
            places.append(None if error else place)
            place += error is None
        rows = replace(
            rows,
            errors=[
                error if place is None or not is_empty[place] else RowProblem(number, "", _UNREAD)
                for number, error, place in zip(rows.numbers, rows.errors, places, strict=True)
            ],
        )
        predictions = predictions.take(pa.array(places, pa.int64()))
        if EMBEDDING in predictions.column_names and self._form == "parquet":
            assert self._dimensions is not None
            vectors = as_vectors(predictions[EMBEDDING].combine_chunks(), self._embedding_type, self._dimensions)
            predictions = predictions.set_column(predictions.column_names.index(EMBEDDING), EMBEDDING, vectors)
        names = predicted_names(predictions.column_names, self._kept.types)
        predictions = predictions.rename_columns([names[name] for name in predictions.column_names])
        {"parquet": self._parquet, "csv": self._csv, "jsonl": self._json_lines, "openai": self._responses}[self._form](
            rows, predictions, stamp
        )

    def _begin_embeddings(self, dimensions: int) -> None:
        """Writes the rows before the first embedding, now that its size is known."""
        self._dimensions = dimensions
        waiting, self._waiting = self._waiting, []
        for rows in waiting:
            self.write(*rows)

    def _parquet(self, rows: Rows, predictions: pa.Table, stamp: Stamp) -> None:
        kept = {name: _as_array(rows.kept[name], kind) for name, kind in self._kept.types.items()}
        table = pa.table({**kept, **dict(zip(predictions.column_names, predictions.columns, strict=True))})
        for name, kind in STAMPS.items():
            table = table.append_column(pa.field(name, kind), pa.array(_stamps(rows, stamp)[name], kind))
        if self._out is None:
            self._out = self._stack.enter_context(
                pq.ParquetWriter(self._file, table.schema, **parquet_options(table.schema))
            )
        self._out.write_table(table)

    def _csv(self, rows: Rows, predictions: pa.Table, stamp: Stamp) -> None:
        predictions = predictions.select([one.name for one in predictions.schema if not pa.types.is_nested(one.type)])
        lines = _lines(rows, self._kept, predictions, stamp)
        if self._out is None:
            self._out = csv.writer(_UnixLines(self._open_text()), delimiter=self._delimiter)
            names = [*self._kept.types, *predictions.column_names, *STAMPS]
            self._out.writerow([_cell(name, self._escape_formulas) for name in names])
        self._out.writerows([_cell(value, self._escape_formulas) for value in line.values()] for line in lines)

    def _json_lines(self, rows: Rows, predictions: pa.Table, stamp: Stamp) -> None:
        self._write_json(_lines(rows, self._kept, predictions, stamp))

    def _responses(self, rows: Rows, predictions: pa.Table, stamp: Stamp) -> None:
        columns = (GENERATED, "prompt_tokens", "generated_tokens", "finish_reason")
        values = zip(*(predictions[name].to_pylist() for name in columns), strict=True)
        ids, places = _as_list(rows.kept[ID]), zip(rows.numbers, rows.errors, rows.inputs, strict=True)
        self._write_json(
            response(
                id_,
                self._as_answer(inputs, *value) if inputs is not None and error is None else None,
                f"row {number} {error}" if error else None,
                place=f"{stamp.model_digest} {stamp.input_file} {number}",
                model=f"{stamp.model}/{stamp.version}",
                created_s=stamp.predicted_at_s,
            )
            for id_, value, (number, error, inputs) in zip(ids, values, places, strict=True)
        )

    def _as_answer(self, inputs: Values, text: str, prompt_tokens: int, tokens: int, finish_reason: str) -> BatchAnswer:
        message = self._as_message(inputs, text)
        return BatchAnswer(message, prompt_tokens, tokens, "tool_calls" if "tool_calls" in message else finish_reason)

    def _write_json(self, values: Iterable[Mapping[str, Any]]) -> None:
        self._out = self._out or self._open_text()
        self._out.writelines(json.dumps(without_nan(value), ensure_ascii=False, default=str) + "\n" for value in values)

    def _open_text(self) -> Any:
        # Half a surrogate pair is written as JSON escapes it.
        return self._stack.enter_context(self._file.open("w", encoding="utf-8", errors="backslashreplace", newline=""))


def predicted_names(predicted: Iterable[str], there: Collection[str]) -> dict[str, str]:
    """The column name of each predicted value next to these columns."""
    return {name: f"predicted_{name}" if name in there else name for name in predicted}


def _stamps(rows: Rows, stamp: Stamp) -> dict[str, list[Any]]:
    count, when = len(rows.numbers), datetime.fromtimestamp(stamp.predicted_at_s, UTC)
    return {
        "error": [None if error is None else str(error) for error in rows.errors],
        "model": [stamp.model] * count,
        "version": [stamp.version] * count,
        "model_digest": [stamp.model_digest] * count,
        "predicted_at": [when] * count,
        "input_file": [stamp.input_file] * count,
        "input_row": rows.numbers,
    }


def _lines(rows: Rows, kept: KeptColumns, predictions: pa.Table, stamp: Stamp) -> Iterator[dict[str, Any]]:
    """The rows as mappings, with the values of JSON and CSV inputs as they are."""
    columns = {name: _as_list(rows.kept[name]) for name in kept.types}
    columns |= {name: predictions[name].to_pylist() for name in predictions.column_names}
    columns |= _stamps(rows, stamp)
    columns["predicted_at"] = [when.isoformat() for when in columns["predicted_at"]]
    names = list(columns)
    return (dict(zip(names, line, strict=True)) for line in zip(*columns.values(), strict=True))


class _UnixLines:
    """A text file for csv.writer, which quotes a carriage return only if its own lines end with one."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, line: str) -> None:
        self._file.write(line.removesuffix("\r\n") + "\n")


def _cell(value: Any, escape_formulas: bool) -> Any:
    if isinstance(value, str):
        return f"'{value}" if escape_formulas and value.startswith(FORMULA) else value
    if value is None:
        return value
    return json.dumps(without_nan(value), ensure_ascii=False, default=str)


# Types of columns that travel along


def _type_of(column: ColumnValues) -> pa.DataType:
    if isinstance(column, pa.Array):
        return column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    kind = pa.null()
    for found in {type(value) for value in column}:
        kind = _merge(kind, _PLAIN.get(found, pa.string()))
    if kind == pa.int64() and any(isinstance(value, int) and value.bit_length() > 63 for value in column):
        return pa.string()
    return kind


_PLAIN = {type(None): pa.null(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
"""The types of JSON values; all others are texts, or become JSON texts."""


def _merge(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type for the values of both; a text holds those that have no common type."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if all(map(pa.types.is_integer, (one, other))):
        return pa.int64()
    is_number = all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (one, other))
    return pa.float64() if is_number else pa.string()


def _largest(column: ColumnValues) -> int:
    """The largest absolute value of whole numbers; 0 without any."""
    if not isinstance(column, pa.Array):
        return max((abs(value) for value in column if type(value) is int), default=0)
    if not pa.types.is_integer(column.type):
        return 0
    ends = pc.min_max(column).as_py().values()
    return max((abs(value) for value in ends if value is not None), default=0)


def _as_list(column: ColumnValues) -> Sequence[Any]:
    return column.to_pylist() if isinstance(column, pa.Array) else column


def _as_array(column: ColumnValues, kind: pa.DataType) -> pa.Array:
    """The column in a type of `KeptColumns`; one without any value is a column of texts."""
    kind = pa.string() if pa.types.is_null(kind) else kind
    if isinstance(column, pa.Array):
        column = decoded(column) if pa.types.is_dictionary(column.type) else column
        if column.type == kind or kind != pa.string():
            return column.cast(kind)
    values = _as_list(column)
    return pa.array([_text(value) for value in values] if kind == pa.string() else values, kind)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else as_json(value)
    except TypeError:  # such as a date
        text = str(value)
    return text.encode("utf-8", "backslashreplace").decode()
