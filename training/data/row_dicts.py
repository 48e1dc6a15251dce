"""Rows that are Python mappings: one mapping a row, or one of columns. Each value's type is checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from datetime import date
from decimal import Decimal
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from training.data.arrow_columns import NESTED, as_json
from training.data.batch_requests import RefusedRequest
from training.data.ipc_files import BLOCK_ROWS
from training.data.readers import Block, find_column_problems, source_error
from training.data.row_problems import RowProblem, shorten
from training.problems import Problem

if TYPE_CHECKING:
    from training.data.readers import ExtraColumns
    from training.recipe.source_columns import SourceColumns

# Value types by their names in messages. The first value of a column decides the column's type.
VALUE_TYPES: dict[str, tuple[type, ...]] = {"truth": (bool,), "number": (int, float), "text": (str,)}
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,19}(\.0*)?")
MAX_INTEGER = 2**63
MAX_KEYS = 1000
PART_ROWS = 500
"""Rows that are held as mappings. With more, Python's garbage collector takes a third of the time."""
BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}
"""The spellings of a boolean."""
CASTS = {"string": str, "int64": int, "float64": float, "bool": bool}


def from_mappings(
    rows: Iterable[tuple[int, Any]],
    wanted: SourceColumns,
    where: str,
    slices: ExtraColumns,
    total: int | None = None,
) -> Iterator[Block]:
    """Yields numbered mappings as blocks. The columns are the keys of all rows; a missing key is a missing value."""
    rows = slices.of_rows(rows)
    names, keys = wanted.source_names, _Keys(wanted)
    slice_sources: dict[str, str] = {}
    column_problems: tuple[Problem, ...] = ()
    types_by_column: dict[str, str] = {}
    done = 0
    while True:
        before, problems, numbers = done, list[RowProblem](), list[int]()
        columns: list[list[Any]] = [[] for _ in names]
        kept: dict[str, list[Any]] = {}
        while done < before + BLOCK_ROWS and (part := list(islice(rows, PART_ROWS))):
            is_first = not keys.seen
            if keys.add(row for _, row in part):
                column_problems = tuple(find_column_problems(wanted, [*keys.seen], where))
                slice_sources = slices.of_file([*keys.seen]) if is_first else slices.of_more_rows([*keys.seen])
            mappings, by_row = list[Mapping[str, Any]](), list[list[Any]]()
            sources = {slice_sources[name] for name in filter(slices.reads, slice_sources)}
            for source in sources - kept.keys():
                kept[source] = [None] * len(numbers)  # of rows before, which do not have it
            for number, row in part:
                values, problem = _read_values(number, row, wanted, names, types_by_column)
                if problem is not None:
                    problems.append(problem)
                    if isinstance(problem, RefusedRequest):
                        row = problem.kept
                if _is_mapping(row):
                    numbers.append(number)
                    mappings.append(row)
                    by_row.append(values)
            for column, more in zip(columns, zip(*by_row, strict=True), strict=False):
                column += more
            for source in sources:
                kept[source] += [row.get(source) for row in mappings]
            done += len(part)
        if done == before:
            return
        arrays = {name: _array(column, name, wanted) for name, column in zip(names, columns, strict=True)}
        slice_values = {}
        for name in filter(slices.reads, slice_sources):
            given = slices.of_values(name, kept[slice_sources[name]])
            if given is not None:
                slice_values[name] = given
        share = done / total if total else 0.0
        yield Block(
            where,
            pa.RecordBatch.from_pydict(arrays),
            np.array(numbers, np.int64),
            row_problems=tuple(problems),
            share=share,
            slices=slice_values,
            spelt=True,
            column_problems=column_problems,
        )


class _Keys:
    """The keys of the rows read so far: those that a recipe or its task type can name, and the first MAX_KEYS others,
    since objects may have names of their own in every row."""

    def __init__(self, wanted: SourceColumns) -> None:
        data = wanted.data
        self._nameable = {*wanted.names, *data.rename, *data.rename.values(), *data.cast}
        self._nameable |= {*wanted.task_type.columns, *wanted.task_type.unread_columns}
        self.seen: dict[str, None] = {}
        self._known: set[str] = set()

    def add(self, rows: Iterable[Any]) -> bool:
        """Adds the keys of rows. Returns whether there are new ones."""
        before = len(self.seen)
        for row in rows:
            if _is_mapping(row) and not self._known.issuperset(row):
                for key in map(str, row):
                    if len(self.seen) < MAX_KEYS or key in self._nameable:
                        self.seen[key] = None
                self._known.update(self.seen)
        return len(self.seen) > before


def from_columns(table: Mapping[str, Any], wanted: SourceColumns, where: str, slices: ExtraColumns) -> Iterator[Block]:
    """Yields a mapping of columns, which have equal lengths, as blocks."""
    lengths = {name: len(column) if isinstance(column, Sized) else None for name, column in table.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        lengths_in_words = ", ".join(f"{name} {'no list' if n is None else n}" for name, n in lengths.items())
        raise source_error(
            where, f"has columns of unequal length ({lengths_in_words}): give each row a value in every column"
        )
    rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
    yield from from_mappings(enumerate(rows, 1), wanted, where, slices, next(iter(lengths.values()), 0))


def _read_values(
    number: int, row: Any, wanted: SourceColumns, sources: Mapping[str, str], types_by_column: dict[str, str]
) -> tuple[list[Any], RowProblem | None]:
    """Returns the values of one row in the order of `sources`, None for those that cannot be used, and its first
    problem. Records the types of new columns."""
    values: list[Any] = [None] * len(sources)
    if not _is_mapping(row):
        if isinstance(row, RowProblem):
            return values, row
        description = f"is no mapping of columns to values but of type {type(row).__name__}"
        return values, RowProblem(number, "malformed", description, f": {shorten(row)}")
    first = None
    for place, (name, source) in enumerate(sources.items()):
        value = row.get(source)
        if value is not None:
            form = wanted.form_of(name)
            if form == "text" and type(value) is str and name not in wanted.casts:  # nearly all values
                values[place] = value
                continue
            if form in NESTED:
                value = _to_json(number, name, value)
            elif name == wanted.of_any_type:
                value = _spell(number, name, value)
            elif name in wanted.casts:
                value = _cast(number, name, _to_python(value), wanted)
            else:
                value = _check_type(number, name, _to_python(value), wanted, types_by_column)
        if isinstance(value, RowProblem):
            first = first or value
        else:
            values[place] = value
    return values, first


def _is_mapping(row: Any) -> bool:
    return type(row) is dict or isinstance(row, Mapping)  # the second alone is slow


def _to_python(value: Any) -> Any:
    """Returns whole numbers of other libraries, such as numpy, as int; other values as they are."""
    if isinstance(value, bool | str | int | float):
        return value
    try:
        return index(value)
    except TypeError:
        return value


def _to_json(number: int, name: str, value: Any) -> str | RowProblem:
    try:
        return as_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        description = f"holds a value that JSON cannot write in column {name!r}"
        return RowProblem(number, "type", description, f": {type(error).__name__}: {error}")


def _spell(number: int, name: str, value: Any) -> str | RowProblem | None:
    """Returns a single value as text, and those of a list if they are equal, as the words of a sentence have it."""
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    if isinstance(value, np.datetime64):
        value = None if np.isnat(value) else str(value)
    elif isinstance(value, np.generic):
        value = value.item()
    if value is None or value != value:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str | int | float | Decimal | UUID):
        return str(value)
    description = f"holds {type(value).__name__} in column {name!r} where a single value belongs"
    return RowProblem(number, "type", description, f": {shorten(value)}")


def _cast(number: int, name: str, value: Any, wanted: SourceColumns) -> Any:
    to = wanted.casts[name]
    if isinstance(value, str) and to != "string":
        # As in Arrow, an empty text is a missing value and 1_000 is no number.
        if not value.strip():
            return None
        is_valid = WHOLE_NUMBER.fullmatch(value) if to == "int64" else "_" not in value
        value = value.partition(".")[0] if to == "int64" and is_valid else value
    else:
        is_valid = isinstance(value, bool | str | int | float)
        is_valid = is_valid and (to != "int64" or not isinstance(value, float) or value.is_integer())
        is_valid = is_valid and (to != "bool" or value in (True, False))
    try:
        if is_valid and to == "bool" and isinstance(value, str):
            return BOOLEANS[value.lower()]
        if is_valid and to == "string" and isinstance(value, bool):
            return str(value).lower()
        if is_valid and (to != "int64" or abs(int(value)) < MAX_INTEGER):
            cast = CASTS[to](value)
            # A column of numbers is rounded, because a model computes with 32 bits.
            if to != "float64" or not isinstance(value, int) or cast == value or name not in wanted.data.cast:
                return cast
    except (ValueError, KeyError, OverflowError):
        pass
    return RowProblem(
        number, "type", f"holds no {wanted.cast_in_words(name)} in column {name!r}", f": {shorten(value)}"
    )


def _check_type(number: int, name: str, value: Any, wanted: SourceColumns, types_by_column: dict[str, str]) -> Any:
    """Returns the value if it is of its column's type, else a problem. Text columns hold texts."""
    value_type = next((name for name, types in VALUE_TYPES.items() if isinstance(value, types)), type(value).__name__)
    description = f"holds {type(value).__name__} in column {name!r}"
    form = wanted.form_of(name)
    if form == "image":
        is_valid, expected = value_type == "text", "where a path or the base64 of an image belongs"
    elif form == "text":
        is_valid, expected = value_type == "text", "where a text belongs"
    elif form == "label":
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # in JSON, 1.0 and 1 are one number
        is_label = (
            value_type in VALUE_TYPES
            and not isinstance(value, float)
            and not (value_type == "number" and abs(value) >= MAX_INTEGER)
        )
        # A missing label, which Python writes as NaN, says nothing about the others.
        column_type = types_by_column.setdefault(name, value_type) if is_label else ""
        is_valid = is_label and value_type == column_type
        expected = f"where the rows before hold a {column_type}" if is_label else "where a text or whole number belongs"
    else:
        column_type = types_by_column.setdefault(name, value_type) if value_type in VALUE_TYPES else "text or a number"
        is_valid = value_type == column_type and not (isinstance(value, int) and abs(value) >= MAX_INTEGER)
        expected = f"where a {column_type} belongs"
    return value if is_valid else RowProblem(number, "type", f"{description} {expected}", f": {shorten(value)}")


def _array(values: Sequence[Any], name: str, wanted: SourceColumns) -> pa.Array:
    if any(isinstance(value, str) for value in values):
        # As bytes, since a Python string may hold half a surrogate pair, which Arrow's texts cannot.
        return pa.array([None if v is None else v.encode("utf-8", "surrogatepass") for v in values], pa.binary())
    if wanted.form_of(name) in ("text", "image", *NESTED) and name not in wanted.casts:
        return pa.array(values, pa.string())
    if any(isinstance(value, float) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values)
