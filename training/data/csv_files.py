"""Rows of CSV files, read by pyarrow, which reports the number of every row that does not fit the header."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from training.data.csv_quote_problems import QuotedFields
from training.data.decoding import LONGEST_ROW_BYTES, SEPARATOR, open_text
from training.data.file_systems import display_name
from training.data.ipc_files import BLOCK_ROWS
from training.data.readers import Block, Numbers, match_columns, source_error
from training.data.row_problems import (
    HEADER_READ,
    OTHER_FILE,
    OTHER_ORDER,
    REPEATED_HEADER,
    RowProblem,
    level_of,
    shorten,
)
from training.data.sources import delimiter_of
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from training.data.readers import ExtraColumns
    from training.recipe import Data
    from training.recipe.column_types import Mask
    from training.recipe.source_columns import SourceColumns

MAX_RAGGED = 10_000  # With this many rows that do not fit the header, the delimiter is probably wrong.
HEAD_ROWS = 100  # that show how many columns a file without a header has
MAX_NAME_LENGTH = 100  # characters; a longer name is probably a text
MIN_WORDS_OF_TEXT = 3  # a name of this many words may be a text
NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?")
_YEAR = re.compile(r"(19|20)\d\d")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""The first characters of a formula in spreadsheets that open a CSV file."""
DELIMITERS = {";": "';'", "\t": '"\\t"', "|": "'|'", ",": "','"}


def read_csv(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns) -> Iterator[Block]:
    """CSV. Every value stays a text: `NA`, `1.0`, quoted line breaks. Empty rows are skipped."""
    for file in pinned[split]:
        if (head := _read_head(file, wanted.data)) is not None:
            yield from _CsvFile(file, wanted, slices, head).blocks()


class CsvParser:
    """One CSV file, parsed into columns of bytes."""

    def __init__(self, file: str, data: Data, head: _Head) -> None:
        self.where, self.head = display_name(file), head
        self._file, self._data = file, data

    def read_parts(self, read: list[str], needed: list[str]) -> Iterator[CsvPart]:
        """Yields the rows with the columns `read`, at most BLOCK_ROWS at once, blank ones included. A row may end early
        as `_Ragged` describes; problems of other rows are in `ragged` and `quotes`."""
        head, data = self.head, self._data
        is_quoted = data.quoting == "standard"
        self.ragged = ragged = _Ragged(self.where, head, data, needed)
        # Bytes, so that every row with invalid text is reported.
        convert = pyarrow.csv.ConvertOptions(
            include_columns=read, column_types=dict.fromkeys(read, pa.binary()), strings_can_be_null=False
        )
        # A blank line becomes a row of empty fields, so that rows are numbered as the file has them.
        parse = pyarrow.csv.ParseOptions(
            delimiter=head.delimiter,
            quote_char='"' if is_quoted else False,
            newlines_in_values=is_quoted,
            ignore_empty_lines=False,
            invalid_row_handler=ragged.leave_out,
        )
        # One thread, since pyarrow numbers rows in that mode only.
        options = pyarrow.csv.ReadOptions(
            use_threads=False,
            block_size=LONGEST_ROW_BYTES,
            skip_rows=head.skipped,
            column_names=None if data.header is None else head.names,
        )
        with open_text(self._file, data) as raw:
            has_header = data.header is None
            self.quotes = QuotedFields(raw, head.delimiter, len(head.names), head.first, has_header=has_header)
            source = pa.PythonFile(self.quotes if is_quoted else _ShortLines(raw, ragged), "r")
            try:
                with pyarrow.csv.open_csv(
                    source, read_options=options, parse_options=parse, convert_options=convert
                ) as batches:
                    for batch in batches:
                        for start in range(0, batch.num_rows, BLOCK_ROWS):
                            part = batch.slice(start, BLOCK_ROWS)
                            rows, numbers = ragged.merge_short_rows(part, ragged.numbers(part.num_rows))
                            yield CsvPart(rows, numbers, batch, raw.share)
            except pa.ArrowInvalid as error:
                raise source_error(self.where, _describe_error(error, ragged.last, is_quoted=is_quoted)) from error
        no_rows = pa.RecordBatch.from_pydict({name: pa.array([], pa.binary()) for name in read})
        yield CsvPart(*ragged.merge_short_rows(no_rows, ragged.numbers(0), at_end=True), no_rows, 1.0)


class _ShortLines:
    """The lines of a CSV file without quoting as a file object. A line that is too long is empty."""

    closed = False

    def __init__(self, file: IO[bytes], ragged: _Ragged) -> None:
        self._file, self._ragged = file, ragged
        self._rest, self._row, self._skips = b"", 1, False

    def read(self, size: int = -1) -> bytes:
        """The next whole lines; nothing at the end of the file."""
        while True:
            piece = self._file.read(size)
            data, first = self._rest + piece, piece.find(b"\n")
            if self._skips:
                self._skips = bool(piece) and first < 0
                data = b"" if first < 0 else piece[first:]
            elif data.find(b"\n") > LONGEST_ROW_BYTES:
                self._ragged.leave_out_long(self._row)
                data = data[data.find(b"\n") :]
            end = data.rfind(b"\n") + 1 if piece else len(data)
            whole, self._rest = data[:end], data[end:]
            self._row += whole.count(b"\n")
            if len(self._rest) > LONGEST_ROW_BYTES:
                self._ragged.leave_out_long(self._row)
                self._rest, self._skips = b"", True
            if whole or not piece:
                return whole

    def close(self) -> None:
        """Closes the file beneath."""
        self._file.close()


class CsvPart(NamedTuple):
    """Some rows of a CSV file."""

    rows: pa.RecordBatch
    numbers: Numbers
    batch: pa.RecordBatch
    """The batch of pyarrow that holds the rows, and perhaps more."""
    share: float
    """The share of the file that was read, 0 to 1."""


class _CsvFile:
    """The columns of one CSV file that a recipe reads."""

    def __init__(self, file: str, wanted: SourceColumns, slices: ExtraColumns, head: _Head) -> None:
        if wanted.keeps_rows and head.width is not None:  # rows to predict may lack columns at their end
            head = replace(head, names=head.names[: head.width])
        self._parser, self._head = CsvParser(file, wanted.data, head), head
        self._where, self._wanted, self._slices = self._parser.where, wanted, slices
        self._columns = _match_header(head, wanted, self._where)
        self._slice_columns = slices.of_file(head.names)
        first = head.names[: head.names.count(head.names[0]) == 1]  # a repeated name names no column
        read = [*self._columns.values(), *self._slice_columns.values(), *first]
        if wanted.keeps_rows:  # only a line without any value is no row
            read += [name for name, count in Counter(head.names).items() if count == 1]
        self._read = list(dict.fromkeys(read))
        self._header_read: int | None = None  # the number of the header, if it is read as a row because of data.header

    def blocks(self) -> Iterator[Block]:
        """Its rows."""
        header_checked = False
        for part in self._parser.read_parts(self._read, list(self._columns.values())):
            if part.rows.num_rows and not header_checked:
                header_checked = True
                yield self._empty_block(self._header_remarks(part.batch, part.rows, part.numbers))
            yield from self._split_part(part)
        quotes = self._parser.quotes
        yield self._empty_block(
            (*quotes.take_row_problems(), *quotes.check_line_count()), self._parser.ragged.row_problems()
        )

    def _split_part(self, read: CsvPart) -> Iterator[Block]:
        for start in range(0, read.rows.num_rows, BLOCK_ROWS):  # rows that end early may have been added
            part, numbers = read.rows.slice(start, BLOCK_ROWS), read.numbers[start : start + BLOCK_ROWS]
            part, marked = self._remove_marks(part)
            columns = pa.RecordBatch.from_pydict({name: part.column(source) for name, source in self._columns.items()})
            slices = {
                name: part.column(source) for name, source in self._slice_columns.items() if self._slices.reads(name)
            }
            block = Block(self._where, columns, numbers, share=read.share, slices=slices, spelt=True)
            if not self._wanted.keeps_rows:
                is_empty = empty_rows(columns)
            elif len(self._head.names) > 1:
                is_empty = empty_rows(part)
            else:
                is_empty = np.zeros(part.num_rows, bool)
            if is_empty.any():
                block = block.filter(~is_empty)
            headers, remarks = self._find_headers(part, numbers, marked)
            remarks = sorted(
                [*remarks, *self._parser.quotes.take_row_problems(int(numbers[-1]))], key=lambda problem: problem.row
            )
            yield replace(block, row_problems=(*headers, *self._parser.ragged.row_problems()), remarks=tuple(remarks))

    def _remove_marks(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Mask]:
        """Removes byte order marks from the beginning of rows, as the joined files have them that a program exported.
        Returns also the mask of these rows."""
        place = rows.schema.get_field_index(self._head.names[0])
        column = pa.array([], pa.binary()) if place < 0 else rows.column(place)
        marked = np.zeros(rows.num_rows, bool)
        places = pc.indices_nonzero(pc.starts_with(column, codecs.BOM_UTF8)).to_pylist()
        if places:
            marked[places] = True
            values = column.to_pylist()
            for row in places:
                value = values[row].removeprefix(codecs.BOM_UTF8)
                is_quoted = (
                    self._wanted.data.quoting == "standard" and len(value) > 1 and value[:1] == value[-1:] == b'"'
                )
                values[row] = value[1:-1].replace(b'""', b'"') if is_quoted else value
            rows = rows.set_column(place, rows.schema.field(place), pa.array(values, column.type))
        return rows, marked

    def _find_headers(
        self, rows: pa.RecordBatch, numbers: Numbers, marked: Mask
    ) -> tuple[list[RowProblem], list[RowProblem]]:
        """Returns the headers of other files among the rows, as files have them that were joined; and remarks about
        other rows that begin with a byte order mark."""
        if level_of("header_row", self._wanted) == "ignore":
            return [], []
        repeated = self._find_repeated_headers(rows)
        other_order = self._find_other_order(rows, ~repeated)
        problems = [RowProblem(row, "header_row", REPEATED_HEADER) for row in numbers[repeated].tolist()]
        problems += [RowProblem(row, "malformed", OTHER_ORDER) for row in numbers[other_order].tolist()]
        has_header = self._wanted.data.header is None
        remarks = [
            RowProblem(row, "header_row", OTHER_FILE) for row in numbers[marked & ~repeated].tolist() if has_header
        ]
        return [problem for problem in problems if problem.row != self._header_read], remarks

    def _empty_block(self, remarks: tuple[RowProblem, ...], row_problems: tuple[RowProblem, ...] = ()) -> Block:
        """Returns a block without rows."""
        no_rows = pa.RecordBatch.from_pydict({name: pa.array([], pa.string()) for name in self._columns})
        return Block(
            self._where,
            no_rows,
            np.zeros(0, np.int64),
            row_problems=row_problems,
            share=1.0,
            spelt=True,
            remarks=remarks,
        )

    def _header_remarks(self, batch: pa.RecordBatch, rows: pa.RecordBatch, numbers: Numbers) -> tuple[RowProblem, ...]:
        """Returns a remark about a header that looks like data or, with `data.header`, a first row that looks like a
        header. `rows` are the first of the file, with their `numbers`; `batch` is the first that pyarrow read.
        """
        if self._wanted.data.header is not None:
            filled = np.flatnonzero(~empty_rows(rows))[:1]
            if len(filled) == 0 or not self._is_header(batch, rows.take(pa.array(filled))):
                return ()
            self._header_read = int(numbers[filled[0]])
            return (RowProblem(self._header_read, "header_row", HEADER_READ),)
        reason = self._find_label_in_header(batch) or _find_value_in_names(self._columns.values(), self._head.names)
        if reason is None:
            return ()
        return (RowProblem(self._head.first - 1, "header_row", "looks like data, not like names", f" ({reason})"),)

    def _is_header(self, batch: pa.RecordBatch, first: pa.RecordBatch) -> bool:
        """Whether the first row holds the columns' names, or only its label equals the column's name."""
        if all(first.column(name)[0].as_py() == name.encode() for name in self._read):
            return True
        name = self._label_column()
        return name is not None and first.column(name)[0].as_py() == name.encode() and _count(batch, name, name) == 1

    def _find_label_in_header(self, batch: pa.RecordBatch) -> str | None:
        """Returns why the label column's name is probably a label; None if no other name looks like a value.

        That second sign is needed because a column `spam` with the labels spam and ham is common.
        """
        name, header = self._label_column(), self._head.names
        rows = batch.filter(pa.array(~self._find_repeated_headers(batch)))
        if name is None or not _count(rows, name, name):
            return None
        others = [other for other in header if other != name]
        if not (
            _find_value_in_names(others, header)
            or any(len(other.split()) >= MIN_WORDS_OF_TEXT for other in others)
            or any(_count(rows, other, other) for other in {*others} & {*self._read})
        ):
            return None
        return f"{name!r}, the name of its column {header.index(name) + 1}, is a label of rows below"

    def _label_column(self) -> str | None:
        """Returns the file's name of the label column, if rows have one label each."""
        column = self._wanted.labels
        return self._columns[column.source_name] if column and column.form == "label" else None

    def _find_other_order(self, rows: pa.RecordBatch, mask: Mask) -> Mask:
        """Returns those of the rows in the mask that have only names of columns, each once."""
        found, names = np.zeros(rows.num_rows, bool), {name.encode() for name in self._head.names}
        if len(self._read) > 1:
            # Nearly all rows are out by their first value.
            is_name = pc.is_in(rows.column(0), value_set=pa.array([*names])).to_numpy(False)
            for row in np.flatnonzero(mask & is_name).tolist():
                if all(column[row].as_py() in names for column in rows.columns):
                    found[row] = len({column[row].as_py() for column in rows.columns}) == rows.num_columns
        return found

    def _find_repeated_headers(self, rows: pa.RecordBatch) -> Mask:
        """Returns the rows that repeat the header. At least two columns have to match, if there are several."""
        if len(self._read) < min(2, len(self._head.names)):
            return np.zeros(rows.num_rows, bool)
        named = zip(rows.schema.names, rows.columns, strict=True)  # pyarrow finds a name by a look at all
        return np.logical_and.reduce([pc.equal(column, name.encode()).to_numpy(False) for name, column in named])


def _count(rows: pa.RecordBatch, column: str, value: str) -> int:
    return pc.sum(pc.equal(rows.column(column), value.encode())).as_py() or 0


def empty_rows(rows: pa.RecordBatch) -> Any:
    """Returns the mask of rows that are empty in all columns: blank lines, and empty rows below a spreadsheet table."""
    return np.logical_and.reduce([pc.equal(pc.binary_length(column), 0).to_numpy(False) for column in rows.columns])


@dataclass(frozen=True)
class _Head:
    """The beginning of a CSV file."""

    names: list[str]
    """The names of the columns."""
    delimiter: str
    skipped: int
    """Lines before the header, or before the first row where there is no header: `sep=;` and blank ones."""
    first: int
    """The number of the first row of data."""
    width: int | None = None
    """Without a header: the fields of the first rows, if all of them have as many, and fewer than there are names."""


def _read_head(file: str, data: Data) -> _Head | None:
    """Returns the beginning of a CSV file; None for a file that has neither rows nor a header."""
    where = display_name(file)

    def lines(text: io.TextIOWrapper) -> Iterator[str]:
        while line := text.readline(LONGEST_ROW_BYTES):
            if len(line) == LONGEST_ROW_BYTES:
                raise source_error(where, f"has a header of more than {LONGEST_ROW_BYTES:,} characters")
            yield line

    with open_text(file, data) as raw:
        rest = lines(io.TextIOWrapper(raw, "utf-8", "replace", newline=""))
        start = next(rest, "")
        hint = re.fullmatch(r'"?sep=([^"\r\n])"?\s*', start, re.IGNORECASE)  # Excel writes and reads this line
        if hint and data.delimiter not in (None, hint[1]):  # in the key, null is the suffix's usual delimiter
            message = f"{data.delimiter!r} contradicts the first line of {where}, {start.strip()!r}: set it to null."
            raise UserError.of("data", "data.delimiter", message)
        delimiter = hint[1] if hint else delimiter_of(file, data)
        delimiter = delimiter if data.maxsplit is None else SEPARATOR.decode()
        skipped = int(hint is not None)
        rows = _parse(rest if hint else itertools.chain([start], rest), delimiter, data)
        if data.header is not None:
            widths = _first_widths(rows)
            fewer = widths[0] if len(widths) == 1 and widths[0] < len(data.header) else None
            return _Head(data.header, delimiter, skipped, skipped + 1, fewer) if widths else None
        try:
            for blank, row in enumerate(rows):
                if row:
                    return _Head(row, delimiter, skipped + blank, first=skipped + blank + 2)
        except csv.Error as error:
            raise source_error(
                where, f"has no header that can be read ({error}): is a quotation mark never closed?"
            ) from error
    return None


def _first_widths(rows: Iterator[list[str]]) -> list[int]:
    """Returns the different numbers of fields of the first rows, without blank lines; 0 for rows that are not
    readable."""
    try:
        return list({len(row) for row in itertools.islice(filter(None, rows), HEAD_ROWS)})
    except (csv.Error, UserError):  # the parser reports them with the row
        return [0, 1]


def _parse(lines: Iterable[str], delimiter: str, data: Data) -> Iterator[list[str]]:
    quoting: Literal[0, 3] = csv.QUOTE_NONE if data.quoting == "none" else csv.QUOTE_MINIMAL
    return csv.reader(lines, delimiter=delimiter, quoting=quoting)


def _find_value_in_names(names: Iterable[str], header: list[str]) -> str | None:
    """Returns why one of these names of the header is probably a value; None if all look like names."""
    numbers = [name for name in header if NUMBER.fullmatch(name)]
    numbered = len(numbers) > 1 and numbers == list(map(str, range(len(numbers))))  # a data frame without column names
    # A table may have a column for each year. If another name is a number or a text, the years are values too.
    others = [name for name in header if name and not _YEAR.fullmatch(name)]
    years = bool(others) and not any(name in numbers or len(name) > MAX_NAME_LENGTH for name in others)
    for name in names:
        if name in numbers and not numbered and not (years and _YEAR.fullmatch(name)):
            return f"{name!r} is a number"
        if len(name) > MAX_NAME_LENGTH:
            return f"{shorten(name)} has {len(name):,} characters"
    return None


class _Ragged:
    """The rows of a CSV file with more or fewer fields than its header, and the numbers of all others.

    With `data.header`, a row may end early if the recipe reads none of the missing fields: it is kept, with empty texts
    for them.
    """

    def __init__(self, where: str, head: _Head, data: Data, read: list[str]) -> None:
        self._where, self._head, self._data = where, head, data
        self._needed = 0 if data.header is None else 1 + max(map(head.names.index, read), default=-1)
        self._numbers: set[int] = set()
        self._left_out = 0
        self._new_problems: list[RowProblem] = []
        self._short_rows: deque[tuple[int, list[str]]] = deque()
        self._next = head.first

    def leave_out(self, row: pyarrow.csv.InvalidRow) -> str:
        self._numbers.add(row.number)
        if 0 < self._needed <= row.actual_columns < row.expected_columns:
            with contextlib.suppress(csv.Error):  # the field is too long for the csv module
                fields = next(_parse(io.StringIO(row.text, newline=""), self._head.delimiter, self._data))
                self._short_rows.append((row.number, fields))
                return "skip"
        self._left_out += 1
        if self._left_out < MAX_RAGGED:
            quoted = self._data.quoting == "standard" and row.text.count('"') % 2
            unclosed = " (is a quotation mark never closed? If it is text, set data.quoting: none)" if quoted else ""
            names = "the header has" if self._data.header is None else "data.header names"
            description = f"has {row.actual_columns} fields where {names} {row.expected_columns}{unclosed}"
            self._new_problems.append(RowProblem(row.number, "ragged", description))
        return "skip"

    def leave_out_long(self, row: int) -> None:
        self._new_problems.append(RowProblem(row, "long_text", f"has more than {LONGEST_ROW_BYTES / 2**20:g} MiB"))

    def merge_short_rows(
        self, rows: pa.RecordBatch, numbers: Numbers, *, at_end: bool = False
    ) -> tuple[pa.RecordBatch, Numbers]:
        """Inserts the short rows up to the last of these rows (`at_end`: all), in file order."""
        short_rows = []
        while self._short_rows and (at_end or self._short_rows[0][0] <= self.last):
            short_rows.append(self._short_rows.popleft())
        if not short_rows:
            return rows, numbers
        columns = {}
        for name in rows.schema.names:
            place = self._head.names.index(name)
            columns[name] = [fields[place].encode() if place < len(fields) else b"" for _, fields in short_rows]
        short = pa.RecordBatch.from_pydict(columns, schema=rows.schema)
        numbers = np.concatenate([numbers, np.array([number for number, _ in short_rows], np.int64)])
        order = np.argsort(numbers, kind="stable")
        return pa.concat_batches([rows, short]).take(pa.array(order)), numbers[order]

    @property
    def last(self) -> int:
        """The last number that was assigned."""
        return self._next - 1

    def row_problems(self) -> tuple[RowProblem, ...]:
        """Returns the problems found since the last call. Raises UserError if there are too many."""
        if self._left_out >= MAX_RAGGED:
            delimiter = self._data.delimiter or self._head.delimiter
            delimiter = DELIMITERS.get(delimiter, delimiter)
            message = (
                f"has {MAX_RAGGED:,} rows and more that do not fit its header: does {delimiter} separate its "
                "columns (data.delimiter)?"
            )
            raise source_error(self._where, message)
        problems, self._new_problems = tuple(self._new_problems), []
        return problems

    def numbers(self, count: int) -> Numbers:
        """Assigns numbers to the next valid rows."""
        parts: list[Numbers] = []
        while count > 0:
            numbers = np.arange(self._next, self._next + count, dtype=np.int64)
            self._next += count
            if self._numbers:
                numbers = numbers[[number not in self._numbers for number in numbers.tolist()]]
            parts.append(numbers)
            count -= len(numbers)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _match_header(head: _Head, wanted: SourceColumns, where: str) -> dict[str, str]:
    """Returns the file's name of each column, as match_columns does. Errors name the cause: a wrong delimiter, or a row
    of data instead of a header."""
    header = head.names
    try:
        return match_columns(wanted, header, where)
    except UserError as error:
        if wanted.data.header is not None:
            if head.width is None:
                raise
            message = (
                f"names {len(wanted.data.header)} columns ({', '.join(wanted.data.header)}), and the rows of {where} "
                f"have {head.width}, taken for {', '.join(header)}: name the columns of these rows, in order."
            )
            raise UserError.of("data", "data.header", message) from error
        for other, yaml in DELIMITERS.items():
            if len(header) == 1 and other in header[0]:
                message = f"the header of {where} is one column, {header[0]!r}: set data.delimiter: {yaml}."
                raise UserError.of("data", "data.delimiter", message) from error
        renamed = {wanted.data.rename.get(name, name) for name in header}
        if renamed.issuperset(wanted.names):
            raise
        repeated = next((f"{name!r} is listed twice" for name, count in Counter(header).items() if count > 1), None)
        reason = _find_value_in_names(header, header) or repeated
        if reason or (renamed.isdisjoint(wanted.names) and "Did you mean" not in str(error)):
            verdict = f"looks like data, not like names ({reason})" if reason else "names none of the recipe's columns"
            shown, example = ", ".join(map(shorten, header[:20])), ", ".join(_example_header(wanted, len(header)))
            message = (
                f"the first row of {where} {verdict}: {shown}. If the table has no header, name its {len(header)} "
                f"columns, such as data.header: [{example}]."
            )
            problems = [Problem(kind="data", where="data.header", message=message)]
            raise UserError(problems if reason else [*error.problems, *problems]) from error
        raise


def _example_header(wanted: SourceColumns, count: int) -> list[str]:
    names = [*wanted.names, *(f"column_{number}" for number in range(1, count + 1))]
    return names[:count]


def _describe_error(error: pa.ArrowInvalid, last: int, *, is_quoted: bool) -> str:
    if "straddling" in str(error):
        cause = ": is a quotation mark never closed? If it is text, set data.quoting: none" if is_quoted else ""
        return f"has a row of more than {LONGEST_ROW_BYTES:,} bytes after row {last}{cause}"
    return f"is not readable as CSV: {error}"
