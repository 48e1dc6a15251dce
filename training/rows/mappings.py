"""Rows that are Python mappings, or mappings of columns, as blocks: each value's type is looked at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.ipc import BLOCK_ROWS
from training.rows.blocks import Block, Fault, refused, shortly, stored_names, wanted

if TYPE_CHECKING:
    from training.recipe import Data

# The sorts of value that a column may hold; the first value of a column decides which of them it holds.
SORTS: dict[str, tuple[type, ...]] = {"truth": (bool,), "number": (int, float), "text": (str,)}
NUMBERS = re.compile(r"[+-]?[0-9]{1,19}")
LARGEST = 2**63
CASTS = {"string": str, "int64": int, "float64": float, "bool": bool}


def from_mappings(rows: Iterable[tuple[int, Any]], data: Data, where: str, total: int | None = None) -> Iterator[Block]:
    """Numbered mappings as blocks. The first must have all columns; in a later one, none means no value."""
    rows = iter(rows)
    named: dict[str, str] = {}
    sorts: dict[str, str] = {}
    done = 0
    while held := list(islice(rows, BLOCK_ROWS)):
        first = next((row for _, row in held if isinstance(row, Mapping)), None)
        if not named and first is not None:
            named = stored_names(data, list(map(str, first)), where)
        names = named or {name: name for name in wanted(data)}
        values: list[list[Any]] = []
        numbers: list[int] = []
        faults: list[Fault] = []
        for number, row in held:
            read = _values(number, row, data, names, sorts)
            if isinstance(read, Fault):
                faults.append(read)
            else:
                values.append(read)
                numbers.append(number)
        done += len(held)
        by_column = list(zip(*values, strict=True)) or [()] * len(names)
        arrays = {name: _array(column, name, data) for name, column in zip(names, by_column, strict=True)}
        batch = pa.RecordBatch.from_pydict(arrays)
        yield Block(where, batch, np.array(numbers, np.int64), (), tuple(faults), done / total if total else 0.0)


def from_columns(table: Mapping[str, Any], data: Data, where: str) -> Iterator[Block]:
    """A mapping of columns to as many values each."""
    named = stored_names(data, list(table), where)
    lengths = {name: len(table[name]) if isinstance(table[name], Sized) else None for name in named.values()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        told = ", ".join(f"{name} {'no list' if n is None else n}" for name, n in lengths.items())
        raise refused(where, f"has columns of unequal length ({told}): give each row a value in every column")
    columns = [table[name] for name in named.values()]
    rows = (dict(zip(named.values(), row, strict=True)) for row in zip(*columns, strict=True))
    yield from from_mappings(enumerate(rows, 1), data, where, next(iter(lengths.values())))


def _values(number: int, row: Any, data: Data, named: Mapping[str, str], sorts: dict[str, str]) -> list[Any] | Fault:
    """The values of one row in the order of `named`; `sorts` learns what each column holds."""
    if isinstance(row, Fault):
        return row
    if not isinstance(row, Mapping):
        kind = type(row).__name__
        return Fault(number, "malformed", f"is no mapping of columns to values but of type {kind}", f": {shortly(row)}")
    values: list[Any] = []
    for name, theirs in named.items():
        value = row.get(theirs)
        if value is not None:
            value = _plain(value)
            if name in data.cast:
                value = _cast(number, name, value, data.cast[name])
            elif not isinstance(value, Fault):
                value = _as_before(number, name, value, data, sorts)
            if isinstance(value, Fault):
                return value
        values.append(value)
    return values


def _plain(value: Any) -> Any:
    """Whole numbers of other libraries, such as numpy's, as Python's own."""
    if isinstance(value, bool | str | int | float):
        return value
    try:
        return index(value)
    except Exception:  # whatever the value's own code raises, it is no whole number
        return value


def _cast(number: int, name: str, value: Any, to: str) -> Any:
    if isinstance(value, str) and to != "string":
        # As Arrow reads it: an empty text is no value, and Python's 1_000 no number.
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
    return Fault(number, "type", f"holds no {to} in column {name!r}", f": {shortly(value)}")


def _as_before(number: int, name: str, value: Any, data: Data, sorts: dict[str, str]) -> Any:
    """The value, where it is of the sort that its column holds; texts belong in text columns."""
    sort = next((sort for sort, kinds in SORTS.items() if isinstance(value, kinds)), type(value).__name__)
    what = f"holds {type(value).__name__} in column {name!r}"
    if name in data.text:
        good, belongs = sort == "text", "where a text belongs"
    elif name == data.label:
        held = sorts.setdefault(name, sort)
        fits = sort in SORTS and not isinstance(value, float) and not (sort == "number" and abs(value) >= LARGEST)
        good = fits and sort == held
        belongs = f"where the rows before hold a {held}" if fits else "where a text or whole number belongs"
    else:
        held = sorts.setdefault(name, sort) if sort in SORTS else "text or a number"
        good = sort == held and not (isinstance(value, int) and abs(value) >= LARGEST)
        belongs = f"where a {held} belongs"
    return value if good else Fault(number, "type", f"{what} {belongs}", f": {shortly(value)}")


def _array(values: tuple[Any, ...], name: str, data: Data) -> pa.Array:
    if any(isinstance(value, str) for value in values):
        # Through bytes, because a Python string may hold half a surrogate pair, which is no text.
        return pa.array([None if v is None else v.encode("utf-8", "surrogatepass") for v in values], pa.binary())
    if name in data.text and name not in data.cast:
        return pa.array(values, pa.string())
    if any(isinstance(value, float) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values)
