"""Rows to predict: files read as load_data reads them, with an error in place of the inputs of an unusable row.

Every format of files in training/recipe/tables/formats.py is read, and .txt: a text a line. The rows of a file keep
their order, and each is yielded once: a row that cannot be read at all has nothing but its number and its error.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from training.data.batch_requests import RefusedRequest, as_row, ignored_fields, is_request
from training.data.casting import decode_texts
from training.data.csv_files import CsvParser, empty_rows
from training.data.decoding import open_seekable, open_text
from training.data.faults import Fault, shorten
from training.data.file_systems import display_name, name_of
from training.data.json_files import json_values
from training.data.lists import as_json, from_json, texts_as_json
from training.data.mappings import BOOLEANS
from training.data.model_inputs import TaskType, Values, to_batch
from training.data.parquet_files import ipc_batches, open_ipc, readable
from training.problems import Problem, UserError, nearest
from training.recipe.column_types import EXAMPLES, Form
from training.recipe.data_fields import Data
from training.recipe.program_settings import WantedShard
from training.recipe.tables.checks import LEVELS
from training.recipe.tables.formats import FORMATS

READ = (".txt", *(suffix for source in FORMATS.values() for suffix in source.suffixes))
BATCH_ROWS = 2048

Column: TypeAlias = "list[Any] | pa.Array"
"""The values of a column: an array of Parquet or Arrow, which keeps its type; Python values of other formats."""


@dataclass(frozen=True)
class RowError:
    """The reason why a row cannot be predicted."""

    reason: str
    """Words that follow "row 7", the same for all rows with this fault."""
    detail: str = ""
    """The row's value, which follows the reason."""

    def __str__(self) -> str:
        return self.reason + self.detail


@dataclass(frozen=True)
class Rows:
    """Some rows of a file."""

    numbers: list[int]
    """The number of each row, as messages name it: in CSV the header is row 1, in JSON lines it is the line."""
    inputs: list[Values | None]
    """The model's inputs of each row; None for a row that cannot be used."""
    errors: list[RowError | None]
    """The reason for each of these; None for the others."""
    kept: dict[str, Column] = field(default_factory=dict)
    """The values of the columns that travel along, None where a row lacks one."""

    def usable(self) -> list[Values]:
        """The inputs of the rows that can be used."""
        return [values for values in self.inputs if values is not None]


class RowReader:
    """Reads the rows of files for a model.

    Args:
        task_type: of the model.
        columns: the rows' names for the columns that the model reads, by the task type's.
        kept: further columns to read.
    """

    def __init__(self, task_type: TaskType, columns: Mapping[str, str], kept: Sequence[str] = ()) -> None:
        self._task_type, self._columns, self._kept = task_type, columns, list(kept)
        self._forms: dict[str, Form] = {column: task_type.columns[name].form for name, column in columns.items()}
        self._blank = {column for name, column in columns.items() if task_type.columns[name].may_be_empty}
        optional = {column for name, column in columns.items() if task_type.columns[name].optional} & self._blank
        self._needed = [column for column in self._forms if column not in optional]
        self.ignored_fields: set[str] = set()
        """The fields of requests that would change their answers elsewhere, among the rows read so far."""
        self._messages = next((column for name, column in columns.items() if name == "messages"), None)

    def read(self, file: str) -> Iterator[Rows]:
        """Yields the rows of the file in order, at most BATCH_ROWS at once.

        Raises UserError for a file that is unreadable, or lacks a column that the model needs or that is kept.
        """
        source, is_first = format_of(file), True
        for names, numbers, rows in self._typed(file, source) if _is_typed(source) else self._untyped(file, source):
            if is_first and names is not None:
                self._require_columns(names, file, all_of_them=source != "json")
                is_first = False
            yield self._convert(numbers, rows)

    def shards(self, file: str, shard_rows: int) -> Iterator[Rows]:
        """Yields the rows of the file in parts of `shard_rows`; the last may have fewer. They stay the same when rows
        are appended to the file."""
        waiting: list[Rows] = []
        for rows in self.read(file):
            waiting.append(rows)
            while sum(len(part.numbers) for part in waiting) >= shard_rows:
                whole = _join(waiting)
                yield _slice(whole, 0, shard_rows)
                waiting = [_slice(whole, shard_rows, len(whole.numbers))]
        if any(part.numbers for part in waiting):
            yield _join(waiting)

    def _typed(self, file: str, source: str) -> Iterator[tuple[list[str], Sequence[int], pa.RecordBatch]]:
        form = "Parquet" if source == "parquet" else "Arrow"
        with open_seekable(file) as stored, readable(display_name(file), form):
            if source == "parquet":
                batches = pq.ParquetFile(stored, pre_buffer=False).iter_batches(BATCH_ROWS)
            else:
                batches = ipc_batches(open_ipc(stored))
            done = 0
            for batch in batches:
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    rows = batch.slice(start, BATCH_ROWS)
                    yield rows.schema.names, range(done + 1, done + 1 + rows.num_rows), rows
                    done += rows.num_rows

    def _untyped(self, file: str, source: str) -> Iterator[tuple[list[str] | None, Sequence[int], list[Any]]]:
        """Yields rows of files without types as mappings, or as Fault."""
        if source == "csv":
            names, rows = _csv_rows(file)
        else:
            names, rows = None, self._json_rows(file) if source == "json" else self._text_rows(file)
        while held := list(islice(rows, BATCH_ROWS)):
            mappings = [row for _, row in held if not isinstance(row, Fault)]
            there = names or list(dict.fromkeys(name for row in mappings for name in row)) or None
            yield there, [number for number, _ in held], [row for _, row in held]

    def _text_rows(self, file: str) -> Iterator[tuple[int, Any]]:
        if len(self._needed) > 1:
            needed = " and ".join(self._needed)
            message = f"holds a text a line, and the model takes {len(self._needed)} values: give {needed} as columns "
            raise _problem(file, f"{message}of a .csv.")
        with open_text(file, Data(source="csv", path=file)) as raw:
            for number, line in enumerate(raw, 1):
                try:
                    yield number, {self._needed[0]: line.decode().removesuffix("\n").removesuffix("\r")}
                except UnicodeDecodeError:
                    yield number, Fault(number, "encoding", "is not UTF-8 text")

    def _json_rows(self, file: str) -> Iterator[tuple[int, Any]]:
        with open_text(file, Data(source="json", path=file)) as raw:
            for number, row in json_values(raw, display_name(file)):
                if isinstance(row, Fault):
                    yield number, row
                elif not isinstance(row, dict):
                    yield number, Fault(number, "malformed", "is no object", f": {shorten(row)}")
                elif self._messages and self._messages not in row and is_request(row):
                    self.ignored_fields |= ignored_fields(row)
                    yield number, as_row(number, row, self._messages)
                else:
                    yield number, row

    def _require_columns(self, there: Sequence[str], file: str, all_of_them: bool) -> None:
        """Raises UserError with all problems of a file's column names. Rows of JSON may lack columns that are kept."""
        repeated = [name for name in dict.fromkeys(there) if there.count(name) > 1]
        messages = [f"has two columns {name!r}: rename one." for name in repeated]
        kept = [name for name in self._kept if all_of_them and name not in self._forms]
        for name in dict.fromkeys([*self._needed, *kept]):
            if name not in there:
                messages.append(f"has no column {name!r}: it has {', '.join(there)}.{nearest(name, there)}")
        if messages:
            where = display_name(file)
            raise UserError([Problem(kind="data", where=where, message=message) for message in messages])

    def _convert(self, numbers: Sequence[int], rows: pa.RecordBatch | list[Any]) -> Rows:
        errors: list[RowError | None] = [None] * len(numbers)
        if isinstance(rows, pa.RecordBatch):
            nothing = pa.nulls(rows.num_rows)
            kept: dict[str, Column] = {name: _column(rows, name, nothing) for name in self._kept}
            by_column = [_texts_or_bytes(_column(rows, name, nothing)) for name in self._forms]
        else:
            for place, row in enumerate(rows):
                if isinstance(row, Fault):
                    errors[place] = RowError(row.description, row.value)
            mappings = [_mapping(row) for row in rows]
            kept = {name: [row.get(name) for row in mappings] for name in self._kept}
            by_column = [[row.get(name) for row in mappings] for name in self._forms]
        inputs: list[Values | None] = []
        for place, values in enumerate(zip(*by_column, strict=True)):
            if errors[place] is None:
                found = self._row(values)
                errors[place] = found if isinstance(found, RowError) else None
            inputs.append(None if errors[place] else found)  # type: ignore[arg-type]
        for name, fault, mask, detail in self._faults(inputs):
            usable = [place for place, row in enumerate(inputs) if row is not None]
            for place in (place for place, is_faulty in zip(usable, mask, strict=True) if is_faulty):
                errors[place] = errors[place] or RowError(f"{fault} in column {self._columns[name]!r}", detail)
        inputs = [None if error else row for row, error in zip(inputs, errors, strict=True)]
        return Rows(list(numbers), inputs, errors, kept)

    def _row(self, values: Sequence[Any]) -> Values | RowError:
        given = []
        for (name, form), value in zip(self._forms.items(), values, strict=True):
            try:
                stored = parse_value(value, form)
            except ValueError as error:
                return RowError(f"has something else in column {name!r}, where {error} belongs", f": {shorten(value)}")
            if stored is None and name not in self._blank:
                return RowError(f"has nothing in column {name!r}")
            given.append(stored)
        return complete_values(given, self._forms)

    def _faults(self, inputs: Sequence[Values | None]) -> list[tuple[str, str, Any, str]]:
        usable = [values for values in inputs if values is not None]
        return list(self._task_type.faults_on_request(to_batch(self._task_type, self._columns, usable)))


def read_shards(reader: RowReader, wanted: Sequence[WantedShard], shard_rows: int) -> Iterator[tuple[str, Rows]]:
    """Yields the digest and the rows of each wanted shard, file by file.

    Raises UserError if a shard's rows no longer have its digest.
    """
    for file, of_file in groupby(wanted, lambda shard: shard.file):
        by_number = {shard.number: shard for shard in of_file}
        for number, rows in enumerate(reader.shards(file, shard_rows) if by_number else ()):
            if shard := by_number.get(number):
                if digest_inputs(rows) != shard.digest:
                    break
                yield by_number.pop(number).digest, rows
            if not by_number:
                break
        if by_number:
            raise _problem(file, "has changed since this run began: start another one.")


def format_of(file: str) -> str:
    """The value of data.source for a file; `txt` for a file without columns."""
    return next((name for name, form in FORMATS.items() if name_of(file).endswith(form.suffixes)), "txt")


def complete_values(values: Sequence[Any], columns: Mapping[str, Form]) -> Values:
    """A row's values as they are stored, with empty texts and lists for missing ones."""
    nothing: dict[str, Any] = {"text": "", "texts": []}
    return tuple(
        nothing.get(form) if value is None else value for value, form in zip(values, columns.values(), strict=True)
    )


def parse_value(value: Any, form: Form) -> Any:
    """A value of that form as it is stored; nested ones are parsed from JSON. None for a missing value.

    Raises ValueError for any other value, with the description of a right one.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if form == "text":
        if _is_text(value):
            return value
        raise ValueError("a text")
    if form == "number":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
        raise ValueError("a number")
    if form == "boolean":
        known = BOOLEANS.get(value.strip().lower() if isinstance(value, str) else str(value).lower())
        if known is not None:
            return known
        raise ValueError("true or false")
    try:
        cell = pa.array([value if isinstance(value, str) else as_json(value)])
        column, wrong = from_json(texts_as_json(cell) if form == "content" else cell, "", form)
    except (TypeError, ValueError, RecursionError):
        wrong = {0: ("", "", "")}
    if wrong:
        raise ValueError(f"a value such as {EXAMPLES[form]}")
    return column[0].as_py() or None


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold
        return False


def _mapping(row: Mapping[str, Any] | Fault) -> Mapping[str, Any]:
    if isinstance(row, Fault):
        return row.kept if isinstance(row, RefusedRequest) else {}
    return row


def _is_typed(source: str) -> bool:
    return source in ("parquet", "arrow")


def _column(rows: pa.RecordBatch, name: str, nothing: pa.Array) -> pa.Array:
    return rows.column(name) if name in rows.schema.names else nothing


def _texts_or_bytes(column: pa.Array) -> list[Any]:
    """The column's values; a text that is not UTF-8 stays bytes."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        return [_decode_or_keep(value) for value in column.cast(pa.binary()).to_pylist()]


def _decode_or_keep(value: bytes | None) -> str | bytes | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _csv_rows(file: str) -> tuple[list[str], Iterator[tuple[int, Any]]]:
    parser = CsvParser(file, Data(source="csv", path=file))
    names = parser.head.names

    def rows() -> Iterator[tuple[int, Any]]:
        done, waiting = 0, list[Fault]()
        for part in parser.read_parts(names, names):
            # pyarrow reads ahead: the faults of later rows wait, so that the order does not depend on its speed.
            last = int(part.numbers[-1]) if len(part.numbers) else math.inf
            waiting += parser.ragged.faults()
            found = dict(_csv_part(part.rows, part.numbers, names))
            found |= {fault.row: fault for fault in waiting if fault.row <= last}
            waiting = [fault for fault in waiting if fault.row > last]
            for fault in parser.quotes.take_faults(None if last == math.inf else int(last)):
                # The row's text lacks quotation marks that may belong to it.
                alters_text = fault.check == "stray_quotes" and fault.row in parser.quotes.unclear_rows
                if alters_text or LEVELS[fault.check] == "error":
                    found[fault.row] = fault
            yield from ((number, found[number]) for number in sorted(found) if number > done)
            done = max([done, *found])

    return names, rows()


def _csv_part(rows: pa.RecordBatch, numbers: Any, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
    # An empty row among several columns is a blank line, or was left below a table by a spreadsheet.
    is_row = ~empty_rows(rows) if len(names) > 1 else np.ones(rows.num_rows, bool)
    kept = pa.array(is_row, pa.bool_())
    decoded = [decode_texts(column.filter(kept)) for column in rows.columns]
    bad = {place for _, places in decoded for place in places}
    texts = zip(*(column.to_pylist() for column, _ in decoded), strict=True)
    for place, (number, row) in enumerate(zip(numbers[is_row].tolist(), texts, strict=True)):
        is_bad = place in bad
        yield number, Fault(number, "encoding", "is not UTF-8 text") if is_bad else dict(zip(names, row, strict=True))


def _join(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    numbers, inputs, errors = [], [], []
    for part in parts:
        numbers += part.numbers
        inputs += part.inputs
        errors += part.errors
    return Rows(numbers, inputs, errors, {name: _concat([part.kept[name] for part in parts]) for name in parts[0].kept})


def _concat(columns: Sequence[Column]) -> Column:
    if all(isinstance(column, pa.Array) for column in columns):
        return pa.concat_arrays(columns)
    return [value for column in columns for value in column]


def _slice(rows: Rows, start: int, stop: int) -> Rows:
    kept = {name: column[start:stop] for name, column in rows.kept.items()}
    return Rows(rows.numbers[start:stop], rows.inputs[start:stop], rows.errors[start:stop], kept)


def _problem(file: str, message: str) -> UserError:
    return UserError([Problem(kind="data", where=display_name(file), message=message)])


def digest_inputs(rows: Rows) -> str:
    """The digest of the model's inputs in the usable rows, hex: the same for equal values, whatever file they are
    from."""
    digest = hashlib.sha256()
    for values in rows.usable():
        digest.update(json.dumps(values, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def digest_all(rows: Rows) -> str:
    """The digest of everything in these rows, hex: their numbers, inputs, errors and columns that travel along."""
    digest = hashlib.sha256(digest_inputs(rows).encode())
    errors = [None if error is None else str(error) for error in rows.errors]
    digest.update(json.dumps([rows.numbers, errors]).encode())
    for name, column in rows.kept.items():
        values = column.to_pylist() if isinstance(column, pa.Array) else column
        digest.update(json.dumps([name, values], default=str).encode())
    return digest.hexdigest()
