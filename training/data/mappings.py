"""Python mappings as blocks: one mapping a row, or one of columns. Each value's type is checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.data.arrow_files import BLOCK_ROWS
from training.data.blocks import Block, match_columns, source_error
from training.data.faults import Fault, shortened
from training.data.lists import NESTED, as_json
from training.data.slice_columns import MAX_BYTES, MIXED, SliceColumns, Unfit, need_type

if TYPE_CHECKING:
    from training.recipe.source_columns import SourceColumns

# The sorts of values. The first value of a column decides its sort.
SORTS: dict[str, tuple[type, ...]] = {"truth": (bool,), "number": (int, float), "text": (str,)}
NUMBERS = re.compile(r"[+-]?[0-9]{1,19}")
LARGEST = 2**63
CASTS = {"string": str, "int64": int, "float64": float, "bool": bool}


def from_mappings(
    rows: Iterable[tuple[int, Any]],
    wanted: SourceColumns,
    where: str,
    slices: SliceColumns,
    total: int | None = None,
) -> Iterator[Block]:
    """Yields numbered mappings as blocks. The columns are the keys of the first block; a missing key is a missing
    value."""
    rows = iter(rows)
    named: dict[str, str] = {}
    others: dict[str, str] = {}
    sorts: dict[str, str] = {}
    done = 0
    while held := list(islice(rows, BLOCK_ROWS)):
        if not named and (there := list(dict.fromkeys(str(key) for _, row in held for key in _keys(row)))):
            named = match_columns(wanted, there, where)
            others = slices.of_file(there)
        names = named or {name: name for name in wanted.names}
        read = [_read_values(number, row, wanted, names, sorts) for number, row in held]
        faults = tuple(found for found in read if isinstance(found, Fault))
        good = [place for place, found in enumerate(read) if not isinstance(found, Fault)]
        done += len(held)
        by_column = list(zip(*(read[place] for place in good), strict=True)) or [()] * len(names)
        arrays = {name: _array(column, name, wanted) for name, column in zip(names, by_column, strict=True)}
        slice_values: dict[str, pa.Array] = {}
        for ours in filter(slices.reads, others):
            try:
                slice_values[ours] = _slice_values([held[place][1].get(others[ours]) for place in good])
            except Unfit as unfit:
                slices.leave_out(ours, str(unfit))
        numbers = np.array([held[place][0] for place in good], np.int64)
        share = done / total if total else 0.0
        yield Block(where, pa.RecordBatch.from_pydict(arrays), numbers, (), faults, share, slice_values, spelt=True)


def _keys(row: Any) -> Iterable[Any]:
    return row if isinstance(row, Mapping) else ()


def from_columns(table: Mapping[str, Any], wanted: SourceColumns, where: str, slices: SliceColumns) -> Iterator[Block]:
    """Yields a mapping of columns, which have equal lengths, as blocks."""
    lengths = {name: len(column) if isinstance(column, Sized) else None for name, column in table.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        lengths_in_words = ", ".join(f"{name} {'no list' if n is None else n}" for name, n in lengths.items())
        raise source_error(
            where, f"has columns of unequal length ({lengths_in_words}): give each row a value in every column"
        )
    rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
    yield from from_mappings(enumerate(rows, 1), wanted, where, slices, next(iter(lengths.values()), 0))


def _slice_values(values: list[Any]) -> pa.Array:
    """Returns the values of a column for slices. Raises Unfit if they are not all texts, whole numbers or truths."""
    try:
        # A prefix shows that a long text is too long.
        found = pa.array([value[: MAX_BYTES + 1] if isinstance(value, str) else value for value in values])
    except UnicodeEncodeError as error:
        raise Unfit("holds what is not UTF-8 text") from error
    except (OverflowError, pa.ArrowException) as error:
        raise Unfit(MIXED) from error
    need_type(found.type)
    return found


def _read_values(
    number: int, row: Any, wanted: SourceColumns, named: Mapping[str, str], sorts: dict[str, str]
) -> list[Any] | Fault:
    """Returns the values of one row in the order of `named`, or its fault. Adds the sorts of columns to `sorts`."""
    if isinstance(row, Fault):
        return row
    if not isinstance(row, Mapping):
        kind = type(row).__name__
        return Fault(
            number, "malformed", f"is no mapping of columns to values but of type {kind}", f": {shortened(row)}"
        )
    values: list[Any] = []
    for name, theirs in named.items():
        value = row.get(theirs)
        if value is not None:
            if wanted.form_of(name) in NESTED:
                value = _to_json(number, name, value)
            elif name in wanted.casts:
                value = _cast(number, name, _to_python(value), wanted)
            else:
                value = _check_sort(number, name, _to_python(value), wanted, sorts)
            if isinstance(value, Fault):
                return value
        values.append(value)
    return values


def _to_python(value: Any) -> Any:
    """Returns whole numbers of other libraries, such as numpy, as int; other values as they are."""
    if isinstance(value, bool | str | int | float):
        return value
    try:
        return index(value)
    except TypeError:
        return value


def _to_json(number: int, name: str, value: Any) -> str | Fault:
    try:
        return as_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        description = f"holds what JSON cannot write in column {name!r}"
        return Fault(number, "type", description, f": {type(error).__name__}: {error}")


def _cast(number: int, name: str, value: Any, wanted: SourceColumns) -> Any:
    to = wanted.casts[name]
    if isinstance(value, str) and to != "string":
        # The same rules as Arrow's: an empty text is a missing value, and 1_000 no number.
        if not value.strip():
            return None
        good = NUMBERS.fullmatch(value) if to == "int64" else "_" not in value
    else:
        good = isinstance(value, bool | str | int | float)
        good = good and (to != "int64" or not isinstance(value, float) or value.is_integer())
    try:
        if good and to == "bool" and isinstance(value, str):
            return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
        if good and to == "string" and isinstance(value, bool):
            return str(value).lower()
        if good and (to != "int64" or abs(int(value)) < LARGEST):
            return CASTS[to](value)
    except (ValueError, KeyError, OverflowError):
        pass
    return Fault(number, "type", f"holds no {wanted.cast_in_words(name)} in column {name!r}", f": {shortened(value)}")


def _check_sort(number: int, name: str, value: Any, wanted: SourceColumns, sorts: dict[str, str]) -> Any:
    """Returns the value if it is of its column's sort, else a fault. Text columns hold texts."""
    sort = next((sort for sort, kinds in SORTS.items() if isinstance(value, kinds)), type(value).__name__)
    description = f"holds {type(value).__name__} in column {name!r}"
    form = wanted.form_of(name)
    if form == "text":
        good, belongs = sort == "text", "where a text belongs"
    elif form == "label":
        held = sorts.setdefault(name, sort)
        fits = sort in SORTS and not isinstance(value, float) and not (sort == "number" and abs(value) >= LARGEST)
        good = fits and sort == held
        belongs = f"where the rows before hold a {held}" if fits else "where a text or whole number belongs"
    else:
        held = sorts.setdefault(name, sort) if sort in SORTS else "text or a number"
        good = sort == held and not (isinstance(value, int) and abs(value) >= LARGEST)
        belongs = f"where a {held} belongs"
    return value if good else Fault(number, "type", f"{description} {belongs}", f": {shortened(value)}")


def _array(values: tuple[Any, ...], name: str, wanted: SourceColumns) -> pa.Array:
    if any(isinstance(value, str) for value in values):
        # As bytes, since a Python string may hold half a surrogate pair, which Arrow's texts cannot.
        return pa.array([None if v is None else v.encode("utf-8", "surrogatepass") for v in values], pa.binary())
    if wanted.form_of(name) in ("text", *NESTED) and name not in wanted.casts:
        return pa.array(values, pa.string())
    if any(isinstance(value, float) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values)
