"""Splits by time: the newest rows are test, and the newest before them validation (data.split.by: time).

The cut is known only after the last row, so rows wait on disk until then. Memory: 8 bytes a row, and a block of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from training.data.ipc_files import SPLITS
from training.data.readers import Block
from training.data.row_groups import require_single_values
from training.data.row_problems import shorten
from training.problems import Problem, UserError
from training.recipe.row_split import MICROSECONDS, Kind, parse_gap, parse_time
from training.recipe.source_columns import SourceColumns

if TYPE_CHECKING:
    from training.recipe.column_types import Mask
    from training.recipe.data_fields import Data

Times = np.ndarray[Any, np.dtype[np.float64]]
"""Microseconds since 1970, or numbers."""

_KINDS: tuple[Kind, ...] = get_args(Kind)
_IN_WORDS: Mapping[Kind, str] = {
    "number": "a number",
    "time": "a time without a zone",
    "zoned time": "a time with a zone",
}
_PATTERNS: Mapping[Kind, str] = {
    "number": r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$",
    "time": r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?)?$",
    "zoned time": r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d(:?\d\d)?)$",
}
_TYPES: Mapping[Kind, pa.DataType] = {
    "number": pa.float64(),
    "time": pa.timestamp("us"),
    "zoned time": pa.timestamp("us", "UTC"),
}


@dataclass
class RowTimes:
    """The times of the rows of one set, which are all of one kind."""

    wanted: SourceColumns
    kind: Kind | None = None

    def read(self, block: Block) -> tuple[Block, list[tuple[str, str, Mask, str]]]:
        """Returns the block with the times in place of the values of data.split.column, and the problems of rows whose
        time is missing, unreadable, or of another kind than those before: check, description, mask and value."""
        values = require_single_values(block, self.wanted)
        column = f"in column {self.wanted.split_column!r}"
        found = _by_kind(values)
        times, known = np.full(len(values), np.nan), values.is_null().to_numpy(zero_copy_only=False)
        if types.is_string(values.type):
            known |= pc.equal(pc.utf8_trim_whitespace(values), "").fill_null(True).to_numpy(zero_copy_only=False)
        if types.is_floating(values.type):
            known |= np.isnan(values.to_numpy(zero_copy_only=False))
        problems = [("missing_time", f"has no time {column}", known.copy(), "")]
        first = {kind: int(np.argmax(mask)) for kind, (mask, _) in found.items() if mask.any()}
        if self.kind is None and first:
            self.kind = min((place, kind) for kind, place in first.items())[1]
        for kind, (mask, numbers) in found.items():
            if kind == self.kind:
                times[mask] = numbers
            elif mask.any() and self.kind is not None:
                example = _example(values, first[kind])
                description = f"holds {_IN_WORDS[kind]} {column}, where rows before hold {_IN_WORDS[self.kind]}"
                problems.append(("type", description, mask, example))
            known = known | mask
        if not known.all():
            example = _example(values, int(np.argmin(known)))
            description = f"holds no time such as 2026-05-01 or 2026-05-01T10:30:00+02:00 {column}"
            problems.append(("type", description, ~known, example))
        return replace(block, split_values=pa.array(times)), problems


def _example(values: pa.Array, place: int) -> str:
    """Returns a value as messages show it; Python has no object for some times and zones."""
    return f": {shorten(values.slice(place, 1).cast(pa.string())[0].as_py())}"


def _by_kind(values: pa.Array) -> dict[Kind, tuple[Mask, Times]]:
    """Returns the rows of each kind, and their times."""
    kind = values.type
    if types.is_timestamp(kind) or types.is_date(kind):
        zoned = types.is_timestamp(kind) and kind.tz is not None
        found = {"zoned time" if zoned else "time": values}
    elif types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        found = {"number": values}
    elif types.is_string(kind) or types.is_large_string(kind):
        texts = pc.utf8_trim_whitespace(values.cast(pa.string()))
        found = {
            kind: pc.if_else(pc.match_substring_regex(texts, pattern), texts, None)
            for kind, pattern in _PATTERNS.items()
        }
    else:
        found = {}
    return {kind: _as_numbers(found[kind], kind) for kind in _KINDS if kind in found}


def times_of(texts: pa.Array) -> Times | None:
    """Returns the times of texts of which nearly all are times of one kind, NaN for others; None for other texts."""
    for kind, (mask, times) in _by_kind(texts).items():
        if kind != "number" and mask.mean() >= 0.99:
            found = np.full(len(texts), np.nan)
            found[mask] = times
            return found
    return None


def _as_numbers(values: pa.Array, kind: Kind) -> tuple[Mask, Times]:
    """Returns the rows whose value converts, and its number."""
    to = _TYPES[kind]
    if types.is_string(values.type):
        values = (
            pc.utf8_ltrim(values, "+")
            if kind == "number"
            else pc.replace_substring_regex(values, r"(\.\d{6})\d+", r"\1")
        )
    try:
        converted = values.cast(to, safe=False)
    except pa.ArrowException:  # a day that does not exist
        converted = pa.array([_cast_one(value, to) for value in values], to)
    if kind != "number":
        converted = converted.cast(pa.int64()).cast(pa.float64(), safe=False)  # beyond the year 2255 to 2 µs
    numbers = converted.to_numpy(zero_copy_only=False).astype(np.float64)
    mask = np.isfinite(numbers) & converted.is_valid().to_numpy(zero_copy_only=False)
    return mask, numbers[mask]


def _cast_one(value: pa.Scalar, to: pa.DataType) -> pa.Scalar | None:
    try:
        return value.cast(to)
    except pa.ArrowException:
        return None


def format_time(value: float, kind: Kind) -> str:
    """Returns a time as reports show it."""
    if kind == "number":
        return f"{value:.15g}"
    try:
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=value)
    except OverflowError:
        return f"{value / MICROSECONDS:.0f} s"
    if value % (86_400 * MICROSECONDS) == 0:
        return f"{time:%Y-%m-%d}"
    return f"{time:%Y-%m-%d %H:%M:%S}{'Z' if kind == 'zoned time' else ''}"


@dataclass(frozen=True)
class TimeCut:
    """The times at which the splits begin."""

    starts: Mapping[str, float]
    """The first time of validation and of test, if they are held out."""
    gap: float

    @classmethod
    def of(cls, times: Times, kind: Kind | None, data: Data, held_out: Mapping[str, float]) -> TimeCut:
        """Returns the cut at the times that the recipe names, or before the newest rows by their share or number. Rows
        of equal time are on one side, so there may be more of them. `kind` is None without rows.

        Raises UserError for a recipe whose times do not fit those of the rows, or that leaves a split without rows.
        """
        split = data.split
        if split is None or kind is None:
            return cls({}, 0.0)
        gap, problems = _fitting(split.gap, kind, "gap", data)
        ordered, starts, later = np.sort(times), dict[str, float](), np.inf
        span = f"of {len(times):,} rows from {format_time(ordered[0], kind)} to {format_time(ordered[-1], kind)}"
        for name in (name for name in ("test", "validation") if name in held_out):
            before = ordered[_is_before(ordered, later, gap)]
            written = split.test_from if name == "test" else split.validation_from
            if written is not None:
                start, misfits = _fitting(written, kind, f"{name}_from", data)
                problems += misfits
                rows, where = int((before >= start).sum()), f"data.split.{name}_from"
            else:
                size = held_out[name]
                rows = min(int(size) if size >= 1 else round(size * len(times)), len(before))
                start, where = float(before[-rows]) if rows else later, f"data.{name}_size"
            if not rows and not problems:
                value = _as_written(held_out[name] if written is None else written)
                message = f"{value} leaves {name} without rows, {span}: choose another value."
                problems.append(Problem(kind="data", where=where, message=message))
            starts[name], later = start, start
        if not problems and not _is_before(ordered, later, gap).any():
            shown = " and ".join(f"{name} from {format_time(start, kind)} on" for name, start in starts.items())
            gap_in_words = f", with a gap of {split.gap}" if split.gap else ""
            message = (
                f"no row is left to train on, {span}: {shown}{gap_in_words}. Hold fewer rows out, or give older ones."
            )
            problems.append(Problem(kind="data", where="data.split", message=message))
        if problems:
            raise UserError(problems)
        return cls(starts, gap)

    def masks(self, block: Block) -> dict[str, Mask]:
        """Returns the mask of the rows of each split; rows in a gap are in none."""
        times = block.split_values.to_numpy(zero_copy_only=False)
        masks: dict[str, Mask] = {}
        later = np.inf
        for split in ("test", "validation", "train"):
            if split in self.starts or split == "train":
                start = self.starts.get(split, -np.inf)
                masks[split] = (times >= start) & _is_before(times, later, self.gap)
                later = start
        return {split: masks[split] for split in SPLITS if split in masks}


def _is_before(times: Times, later: float, gap: float) -> Mask:
    mask: Mask = (times < later) & (later - times >= gap)
    return mask


def _fitting(written: Any, kind: Kind, name: str, data: Data) -> tuple[float, list[Problem]]:
    """Returns the value of a field, with a problem if it does not fit the kind of the rows' times."""
    if written is None:
        return 0.0, []
    found = parse_gap(written) if name == "gap" else parse_time(written)
    fits = found.kind == kind or (found.kind == "time" and kind == "zoned time")
    if fits or (name == "gap" and "number" not in (found.kind, kind)):
        return found.value, []
    shown = "a duration" if name == "gap" and found.kind == "time" else _IN_WORDS[found.kind]
    column = data.split.column if data.split else ""
    value = _as_written(written)
    message = f"{value!r} is {shown}, and each row has {_IN_WORDS[kind]} in column {column!r}: write one like it."
    return found.value, [Problem(kind="data", where=f"data.split.{name}", message=message)]


def _as_written(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"


@dataclass
class WaitingRows:
    """Blocks of rows on disk, until the cut is known."""

    file: Path
    times: list[Times] = field(default_factory=list)
    _blocks: list[tuple[Block, Sequence[str]]] = field(default_factory=list)
    """Each block without its rows, and the names of its columns."""

    def add(self, block: Block) -> None:
        """Adds a block that RowTimes has read."""
        self.times.append(block.split_values.to_numpy(zero_copy_only=False))
        columns = [*block.rows.columns, *block.slices.values(), pa.array(block.numbers)]
        batch = pa.RecordBatch.from_arrays(columns, names=list(map(str, range(len(columns)))))
        with self.file.open("ab") as file, pa.ipc.new_stream(file, batch.schema) as writer:
            writer.write(batch)
        # One stream follows another in the file: the columns for slices may differ between blocks.
        without = replace(
            block, rows=block.rows.slice(0, 0), slices=dict.fromkeys(block.slices), split_values=None, row_problems=()
        )
        self._blocks.append((replace(without, numbers=block.numbers[:0], remarks=()), block.rows.schema.names))

    def blocks(self) -> Iterator[Block]:
        """Yields the blocks in order, each with its times. The file is removed after the last one."""
        with pa.OSFile(str(self.file)) as file:
            for (block, names), times in zip(self._blocks, self.times, strict=True):
                columns = pa.ipc.open_stream(file).read_all().combine_chunks().columns
                arrays = [column.combine_chunks() for column in columns]
                yield replace(
                    block,
                    rows=pa.RecordBatch.from_arrays(arrays[: len(names)], names=list(names)),
                    slices=dict(zip(block.slices, arrays[len(names) : -1], strict=True)),
                    numbers=arrays[-1].to_numpy(),
                    split_values=pa.array(times),
                )
        self.file.unlink()
