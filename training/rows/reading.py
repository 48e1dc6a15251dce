"""Rows as they stand in files: CSV, JSON, Parquet and Arrow, a block at a time.

A reader is a function `(asked, split, pinned, slices) -> Iterator[Block]`; READERS names them all. It raises UserError
when the source as a whole cannot be read (no such column, not a Parquet file) and leaves out single rows that it cannot
read, each with a Fault that says why. Of columns that the recipe does not name it reads those that `slices` asks for,
and whatever is wrong with these leaves out no row.

CSV and the typed formats are pyarrow's: its CSV reader tells the number of every row that does not fit. JSON is
Python's own, for pyarrow's stops at the first line that differs and does not say which; arrays are read by ijson, which
holds one object at a time.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from training.ipc import BLOCK_ROWS
from training.problems import Problem, UserError
from training.rows.blocks import Block, Fault, Numbers, refused, stored_names
from training.rows.hub import read_hub
from training.rows.mappings import from_mappings
from training.rows.objects import read_object
from training.rows.opening import Opened, opened
from training.rows.sources import delimiter_of
from training.rows.typed import read_arrow, read_parquet
from training.rows.urls import shown

if TYPE_CHECKING:
    from training.recipe import Data
    from training.rows.asked import Asked
    from training.rows.slices import Slices

LONGEST_ROW_BYTES = 2 * 2**20
MOST_RAGGED = 10_000  # with more rows than this that do not fit the header, it is the file that is not as thought
DELIMITERS = {";": "';'", "\t": '"\\t"', "|": "'|'", ",": "','"}

Reader = Callable[["Asked", str, Mapping[str, Any], "Slices"], Iterator[Block]]


def read_csv(asked: Asked, split: str, pinned: Mapping[str, Any], slices: Slices) -> Iterator[Block]:
    """CSV with a header; every value stays the text it is: `NA`, `1.0`, quoted line breaks. Empty rows do not count."""
    for file in pinned[split]:
        yield from _csv_file(file, asked, slices)


def _csv_file(file: str, asked: Asked, slices: Slices) -> Iterator[Block]:
    where, delimiter = shown(file), delimiter_of(file, asked.data)
    header, blank = _header(file, asked.data, delimiter)
    named = _columns_of(header, asked, where)
    others = slices.of_file(header)
    read = list(dict.fromkeys([*named.values(), *others.values()]))
    ragged = _Ragged(where, delimiter, first=blank + 2)
    with opened(file, asked.data) as raw:
        # One thread, or pyarrow does not know the rows' numbers. Bytes, so that all rows that are no text are found.
        options = {
            "read_options": pyarrow.csv.ReadOptions(use_threads=False, block_size=LONGEST_ROW_BYTES, skip_rows=blank),
            # A blank line becomes a row of empty fields, so that rows are numbered as the file has them.
            "parse_options": pyarrow.csv.ParseOptions(
                delimiter=delimiter,
                newlines_in_values=True,
                ignore_empty_lines=False,
                invalid_row_handler=ragged.leave_out,
            ),
            "convert_options": pyarrow.csv.ConvertOptions(
                include_columns=read,
                column_types={name: pa.binary() for name in read},
                strings_can_be_null=False,
            ),
        }
        try:
            with pyarrow.csv.open_csv(pa.PythonFile(raw, "r"), **options) as batches:
                for batch in batches:
                    for start in range(0, batch.num_rows, BLOCK_ROWS):
                        part = batch.slice(start, BLOCK_ROWS)
                        rows = pa.RecordBatch.from_pydict({ours: part.column(named[ours]) for ours in named})
                        sliced = filter(slices.reads, others)
                        beside = {ours: pa.chunked_array([part.column(others[ours])]) for ours in sliced}
                        block = Block(where, rows, ragged.numbers(rows.num_rows), (), (), raw.share, beside, spelt=True)
                        empty = _empty(rows)
                        if empty.any():
                            block = block.taken(~empty)
                        yield replace(block, faults=ragged.faults())
        except pa.ArrowInvalid as error:
            raise refused(where, _csv_trouble(error, ragged.last)) from error
    yield Block(where, _no_rows(list(named)), ragged.numbers(0), (), ragged.faults(), 1.0, spelt=True)


def _empty(rows: pa.RecordBatch) -> Any:
    """Which rows have nothing in any column that is read: blank lines, and what spreadsheets leave below a table."""
    return np.logical_and.reduce([pc.equal(pc.binary_length(column), 0).to_numpy(False) for column in rows.columns])


def _header(file: str, data: Data, delimiter: str) -> tuple[list[str], int]:
    """The names of the columns, and how many blank lines stand before them."""
    where = shown(file)

    def lines(text: io.TextIOWrapper) -> Iterator[str]:
        while line := text.readline(LONGEST_ROW_BYTES):
            if len(line) == LONGEST_ROW_BYTES:
                raise refused(where, f"has a header of more than {LONGEST_ROW_BYTES:,} characters")
            yield line

    with opened(file, data) as raw:
        text = io.TextIOWrapper(io.BufferedReader(raw), "utf-8", "replace", newline="")
        try:
            for blank, row in enumerate(csv.reader(lines(text), delimiter=delimiter)):
                if row:
                    return row, blank
        except csv.Error as error:
            raise refused(
                where, f"has no header that can be read ({error}): is a quotation mark never closed?"
            ) from error
    raise refused(where, "is empty: its first row must name the columns")


class _Ragged:
    """The rows of a CSV file that have not as many fields as its header, and the numbers of those that have."""

    def __init__(self, where: str, delimiter: str, first: int) -> None:
        self._where, self._delimiter = where, delimiter
        self._numbers: set[int] = set()
        self._new: list[Fault] = []
        self._next = first

    def leave_out(self, row: pyarrow.csv.InvalidRow) -> str:
        self._numbers.add(row.number)
        if len(self._numbers) < MOST_RAGGED:
            unclosed = " (is a quotation mark never closed?)" if row.text.count('"') % 2 else ""
            what = f"has {row.actual_columns} fields where the header has {row.expected_columns}{unclosed}"
            self._new.append(Fault(row.number, "ragged", what))
        return "skip"

    @property
    def last(self) -> int:
        """The number of the last row that was numbered."""
        return self._next - 1

    def faults(self) -> tuple[Fault, ...]:
        """Those found since the last call. Raises UserError where there are too many."""
        if len(self._numbers) >= MOST_RAGGED:
            message = (
                f"has {MOST_RAGGED:,} rows and more that do not fit its header: is "
                f"{DELIMITERS.get(self._delimiter, self._delimiter)} what separates its columns (data.delimiter)?"
            )
            raise refused(self._where, message)
        new, self._new = tuple(self._new), []
        return new

    def numbers(self, count: int) -> Numbers:
        """The numbers of the next rows that fit."""
        found: list[Numbers] = []
        while count > 0:
            numbers = np.arange(self._next, self._next + count, dtype=np.int64)
            self._next += count
            if self._numbers:
                numbers = numbers[[number not in self._numbers for number in numbers.tolist()]]
            found.append(numbers)
            count -= len(numbers)
        return np.concatenate(found) if found else np.zeros(0, np.int64)


def _columns_of(header: list[str], asked: Asked, where: str) -> dict[str, str]:
    """`stored_names`, with a word on the delimiter where the header is one column that holds another."""
    try:
        return stored_names(asked, header, where)
    except UserError as error:
        for other, spelt in DELIMITERS.items():
            if len(header) == 1 and other in header[0]:
                message = f"the header of {where} is one column, {header[0]!r}: set data.delimiter: {spelt}."
                raise UserError([Problem(kind="data", where="data.delimiter", message=message)]) from error
        raise


def _csv_trouble(error: pa.ArrowInvalid, last: int) -> str:
    if "straddling" in str(error):
        return f"has a row of more than {LONGEST_ROW_BYTES:,} bytes after row {last}: is a quotation mark never closed?"
    return f"is not readable as CSV: {error}"


def read_json(asked: Asked, split: str, pinned: Mapping[str, Any], slices: Slices) -> Iterator[Block]:
    """JSON lines, one object a line, where blank lines do not count; or one array of objects."""
    for file in pinned[split]:
        where = shown(file)
        with opened(file, asked.data) as raw:
            lines = io.BufferedReader(raw, 2**20)
            array = lines.peek(1000).lstrip(b" \t\r\n").startswith(b"[")
            rows = _elements(_Array(lines, where), where) if array else _lines(lines, where)
            for block in from_mappings(rows, asked, where, slices):
                yield replace(block, share=raw.share)


def _lines(lines: io.BufferedReader[Opened], where: str) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := lines.readline(LONGEST_ROW_BYTES + 1):
        number += 1
        if len(line) > LONGEST_ROW_BYTES:
            raise refused(
                where, f"has a line of more than {LONGEST_ROW_BYTES:,} bytes (line {number}): one object a line"
            )
        if line.strip():
            yield number, _parsed(number, line)


def _parsed(number: int, line: bytes) -> Any:
    """The value of one line, or what is wrong with it."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Fault(number, "encoding", "is not UTF-8 text", f" (byte 0x{line[error.start]:02x})")
    except json.JSONDecodeError as error:
        return Fault(number, "malformed", "is not JSON", f" ({error.msg}, column {error.colno})")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets
        return Fault(number, "malformed", "is not JSON that can be read", f" ({str(error).partition(';')[0]})")


class _Array:
    """The bytes of a JSON array, as far as one element may reach."""

    def __init__(self, file: io.BufferedReader[Opened], where: str) -> None:
        self._file, self._where = file, where
        self.row = 0
        self._of_row = 0

    def read(self, size: int = -1) -> bytes:
        """The next bytes. Raises UserError where the element has no end."""
        self._of_row += size
        if self._of_row > LONGEST_ROW_BYTES:
            message = f"has an element of more than {LONGEST_ROW_BYTES:,} bytes after row {self.row}"
            raise refused(self._where, message)
        return self._file.read(size)

    def has_given(self, row: int) -> None:
        """That an element has ended."""
        self.row, self._of_row = row, 0


def _elements(array: _Array, where: str) -> Iterator[tuple[int, Any]]:
    import ijson

    number = 0
    try:
        for number, row in enumerate(ijson.items(array, "item", use_float=True), 1):
            array.has_given(number)
            yield number, row
    except (ijson.JSONError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise refused(where, f"is not a JSON array to its end: after row {number}, {said}") from error


def _no_rows(names: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: pa.array([], pa.string()) for name in names})


READERS: dict[str, Reader] = {
    "csv": read_csv,
    "json": read_json,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "hub": read_hub,
    "python": read_object,
}
