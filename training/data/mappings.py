"""Python mappings as blocks: one mapping a row, or one of columns. Each value's type is checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from itertools import islice, repeat
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.data.arrow_files import BLOCK_ROWS
from training.data.blocks import Block, match_columns, source_error
from training.data.faults import Fault, shortened
from training.data.lists import NESTED, as_json
from training.data.slice_columns import MAX_BYTES, MAX_VALUES, MIXED, NOT_READ, SliceColumns, Unfit

if TYPE_CHECKING:
    from training.recipe import Data
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
    there: Sequence[str] = (),
) -> Iterator[Block]:
    """Yields numbered mappings as blocks. The first must have all columns; in a later one, a missing key is a missing
    value. `there` names the columns if they are known."""
    rows = iter(rows)
    named: dict[str, str] = {}
    others: dict[str, str] = {}
    known: set[Any] = set()
    sorts: dict[str, str] = {}
    done = 0
    while held := list(islice(rows, BLOCK_ROWS)):
        first = next((row for _, row in held if isinstance(row, Mapping)), None)
        if not named and first is not None:
            there = there or list(map(str, first))
            named = match_columns(wanted, there, where)
            others, known = slices.of_file(there), set(first)
        names = named or {name: name for name in wanted.names}
        read = [_values(number, row, wanted, names, sorts) for number, row in held]
        faults = tuple(found for found in read if isinstance(found, Fault))
        good = [place for place, found in enumerate(read) if not isinstance(found, Fault)]
        done += len(held)
        by_column = list(zip(*(read[place] for place in good), strict=True)) or [()] * len(names)
        arrays = {name: _array(column, name, wanted) for name, column in zip(names, by_column, strict=True)}
        batch = pa.RecordBatch.from_pydict(arrays)
        share = done / total if total else 0.0
        slice_values = _slice_values([held[place][1] for place in good], others, known, wanted.data, slices)
        numbers = np.array([held[place][0] for place in good], np.int64)
        yield Block(where, batch, numbers, (), faults, share, slice_values, spelt=True)


def from_columns(table: Mapping[str, Any], wanted: SourceColumns, where: str, slices: SliceColumns) -> Iterator[Block]:
    """Yields a mapping of columns, which have equal lengths, as blocks."""
    named = match_columns(wanted, list(table), where)
    lengths = {name: len(table[name]) if isinstance(table[name], Sized) else None for name in named.values()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        lengths_in_words = ", ".join(f"{name} {'no list' if n is None else n}" for name, n in lengths.items())
        raise source_error(
            where, f"has columns of unequal length ({lengths_in_words}): give each row a value in every column"
        )
    columns = [table[name] for name in named.values()]
    there = [name for name in table if isinstance(name, str)]
    others = [name for name in there if slices.reading and name not in named.values()]
    count = next(iter(lengths.values()))
    slice_values = [_guarded(table, name, count, wanted.data, slices) for name in others]
    rows = (
        dict(zip([*named.values(), *others], [*row, *more], strict=True))
        for row, *more in zip(zip(*columns, strict=True), *slice_values, strict=False)
    )
    yield from from_mappings(enumerate(rows, 1), wanted, where, slices, count, there)


def _guarded(table: Mapping[str, Any], name: str, rows: int | None, data: Data, slices: SliceColumns) -> Iterator[Any]:
    """Yields the values of a column for slices as long as they are wanted, then None."""
    ours = data.rename.get(name, name)
    try:
        column = table[name]
        _need_in_order(column, rows)
        for value in column:
            if not slices.reads(ours):
                break
            yield value
    except Unfit as unfit:
        slices.leave_out(ours, str(unfit))
    except Exception:  # whatever the column's own code raises
        slices.leave_out(ours, NOT_READ)
    slices.leave_out(ours, NOT_READ)
    yield from repeat(None)


def _need_in_order(column: Any, rows: int | None) -> None:
    """Raises Unfit if the column is no sequence or array with a value for each row."""
    none = (str, bytes, bytearray, Mapping, Set)
    if isinstance(column, none) or not isinstance(column, Sized) or not hasattr(column, "__getitem__"):
        raise Unfit(f"is of type {type(column).__name__}")
    if (held := len(column)) != rows:
        raise Unfit(f"holds {held:,} value{'' if held == 1 else 's'} for {rows:,} row{'' if rows == 1 else 's'}")


def _slice_values(
    rows: Sequence[Mapping[Any, Any]], others: Mapping[str, str], known: set[Any], data: Data, slices: SliceColumns
) -> dict[str, pa.ChunkedArray]:
    """Returns the rows' values in columns for slices; `known` are the columns of the first row."""
    for row in rows if slices.reading else ():
        if not known.issuperset(row) and len(known) < MAX_VALUES:
            for name in [name for name in row if name not in known and isinstance(name, str)]:
                slices.leave_out(data.rename.get(name, name), "is not in the first row")
            known.update(row)
    found: dict[str, pa.ChunkedArray] = {}
    for ours in filter(slices.reads, others):
        try:
            found[ours] = pa.chunked_array([_array_of([row.get(others[ours]) for row in rows])])
        except Unfit as unfit:
            slices.leave_out(ours, str(unfit))
    return found


def _array_of(values: list[Any]) -> pa.Array:
    """Returns values of one sort as a column. Raises Unfit if they are not all texts, whole numbers or truths."""
    held = [value if value is None or type(value) in (bool, str, int) else _of_other_library(value) for value in values]
    if len({type(value) for value in held if value is not None}) > 1:
        raise Unfit(MIXED)
    try:
        # Only as much of a long text as shows that it is too long.
        return pa.array([value[: MAX_BYTES + 1] if isinstance(value, str) else value for value in held])
    except UnicodeEncodeError as error:
        raise Unfit("holds what is not UTF-8 text") from error
    except (OverflowError, pa.ArrowException) as error:
        raise Unfit("holds numbers of more than 64 bits") from error


def _of_other_library(value: Any) -> str | int:
    try:
        if isinstance(value, np.bool_):
            return bool(value)
        return str.__str__(value) if isinstance(value, str) else index(value)
    except TypeError as error:
        raise Unfit(f"is of type {type(value).__name__}") from error


def _values(
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
                value = _spelt(number, name, value)
            elif name in wanted.casts:
                value = _cast(number, name, _plain(value), wanted)
            else:
                value = _as_before(number, name, _plain(value), wanted, sorts)
            if isinstance(value, Fault):
                return value
        values.append(value)
    return values


def _plain(value: Any) -> Any:
    """Returns whole numbers of other libraries, such as numpy, as int; other values as they are."""
    if isinstance(value, bool | str | int | float):
        return value
    try:
        return index(value)
    except TypeError:
        return value


def _spelt(number: int, name: str, value: Any) -> str | Fault:
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


def _as_before(number: int, name: str, value: Any, wanted: SourceColumns, sorts: dict[str, str]) -> Any:
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
