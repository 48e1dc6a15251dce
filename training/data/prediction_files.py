"""Files of rows to predict, read as load_data reads them, with all columns, and written with the predictions.

Every format of files in training/recipe/tables/formats.py is read, and .txt: a text a line. Written are the formats
that have `predicted` suffixes there; a .csv has no predictions that are lists or objects. The columns of predictions
have the names of `TaskType.record_types`; `label` becomes `predicted_label` if the first rows have a column `label`.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from training.data.casting import decode_texts
from training.data.csv_files import CsvParser, empty_rows
from training.data.decoding import open_seekable, open_text
from training.data.faults import Fault, Faults, shorten
from training.data.file_systems import display_name
from training.data.json_files import json_values
from training.data.lists import as_json, from_json, texts_as_json
from training.data.parquet_files import ipc_batches, open_ipc, readable
from training.problems import Problem, UserError, nearest
from training.recipe.column_types import EXAMPLES, Form
from training.recipe.fields import Data
from training.recipe.tables.checks import LEVELS
from training.recipe.tables.formats import FORMATS

READ = (".txt", *(suffix for source in FORMATS.values() for suffix in source.suffixes))
WRITTEN = tuple(suffix for source in FORMATS.values() for suffix in source.predicted)
BATCH_ROWS = 2048

Rows: TypeAlias = pa.RecordBatch | list[dict[str, Any]]
"""A record batch of Parquet or Arrow, which keeps its types; mappings of other formats."""
Values = tuple[Any, ...]
Prediction = Mapping[str, Any]
"""Values by the names of the added columns."""


class Batch(NamedTuple):
    """Some rows of a file."""

    rows: Rows
    inputs: list[Values | None]
    """The model's inputs of each row; None for a row without them."""
    numbers: Sequence[int]
    """The number of each row, as messages name it."""


def read(
    file: Path,
    columns: Mapping[str, Form],
    added: Iterable[str],
    blank: Collection[str] = (),
    optional: Collection[str] = (),
) -> Iterator[Batch]:
    """Yields the rows of the file in order, with their values in these columns. Values may be missing in `blank`
    columns, and `optional` ones may be absent. A .txt file has one column of texts.

    Raises UserError for a file that is unreadable, lacks a column, has a column with the name of a prediction, or has
    no rows; for the first value that does not fit; and at the end for all rows that cannot be read.
    """
    needed, predictions, faults = [name for name in columns if name not in optional], None, Faults()
    source = _format_of(file)
    batches = _typed_batches(file, source) if source in ("parquet", "arrow") else _batches(file, source, needed, faults)
    for numbers, rows in batches:
        is_first = predictions is None
        predictions = predictions or prediction_names(_names(rows), added)
        _need_columns(_names(rows), needed if is_first else (), predictions.values(), file)
        yield Batch(rows, _inputs(numbers, rows, columns, blank, file), numbers)
    if problems := [
        Problem(kind="data", where=where, message=f"{description}: correct or remove {them}.")
        for _, where, description, them in faults.summaries()
    ]:
        raise UserError(problems)
    if predictions is None:
        raise _problem(file, "holds no rows.")


def prediction_names(there: Collection[str], added: Iterable[str]) -> dict[str, str]:
    """Returns the column name of each prediction in a file with these columns."""
    return {name: f"predicted_{name}" if name in there else name for name in added}


def _format_of(file: Path) -> str:
    """Returns the value of data.source for a file; `txt` for a file without columns."""
    return next((name for name, form in FORMATS.items() if file.name.endswith(form.suffixes)), "txt")


def _names(rows: Rows) -> list[str]:
    if isinstance(rows, pa.RecordBatch):
        return list(rows.schema.names)
    return list(dict.fromkeys(name for row in rows for name in row))


def _inputs(
    numbers: Sequence[int], rows: Rows, columns: Mapping[str, Form], blank: Collection[str], file: Path
) -> list[Values | None]:
    if isinstance(rows, pa.RecordBatch):
        nothing = pa.nulls(rows.num_rows)
        try:
            by_column = [(rows.column(name) if name in _names(rows) else nothing).to_pylist() for name in columns]
        except UnicodeDecodeError as error:
            raise _problem(file, f"is not UTF-8 text in a row from {numbers[0]} to {numbers[-1]}.") from error
    else:
        by_column = [[row.get(name) for row in rows] for name in columns]
    found: list[Values | None] = []
    for number, values in zip(numbers, zip(*by_column, strict=True), strict=True):
        given = [
            need_value(value, form, "data", str(file), f"row {number} has {value!r:.60} in column {name!r}")
            for (name, form), value in zip(columns.items(), values, strict=True)
        ]
        found.append(complete_values(given, columns, blank))
    return found


def complete_values(values: Sequence[Any], columns: Mapping[str, Form], blank: Collection[str] = ()) -> Values | None:
    """Returns a row's values as they are stored; None if one is missing in a column that is not `blank`."""
    if any(value is None and name not in blank for name, value in zip(columns, values, strict=True)):
        return None
    nothing: dict[str, Any] = {"text": "", "texts": []}
    return tuple(
        nothing.get(form) if value is None else value for value, form in zip(values, columns.values(), strict=True)
    )


def need_value(value: Any, form: Form, kind: str, where: str, subject: str = "") -> Any:
    """Returns a value of that form as it is stored; nested ones are parsed from JSON. None for a missing value.

    Raises UserError for any other value, with `subject` as the start of the message.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    subject = subject or f"{value!r:.60} is given"
    if form == "text":
        if _is_text(value):
            return value
        expected = "a text"
    elif form == "number":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
        expected = "a number"
    else:
        cell = pa.array([value if isinstance(value, str) else as_json(value)])
        column, wrong = from_json(texts_as_json(cell) if form == "content" else cell, "", form)
        if not wrong:
            return column[0].as_py() or None
        expected = f"such as {EXAMPLES[form]}"
    raise UserError([Problem(kind=kind, where=where, message=f"{subject}, where {expected} belongs.")])


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold
        return False


def _need_columns(there: Sequence[str], columns: Iterable[str], added: Iterable[str], file: Path) -> None:
    """Raises UserError with all problems of a file's column names."""
    messages = [f"has two columns {name!r}: rename one." for name in dict.fromkeys(there) if there.count(name) > 1]
    for name in columns:
        if name not in there:
            messages.append(f"has no column {name!r}: it has {', '.join(there)}.{nearest(name, there)}")
    for name in added:
        if name in there:
            messages.append(f"has a column {name!r}, which is the name of a prediction: rename or drop it.")
    if messages:
        raise UserError([Problem(kind="data", where=str(file), message=one) for one in messages])


Numbered: TypeAlias = Iterator[tuple[Sequence[int], Any]]


def _typed_batches(file: Path, source: str) -> Numbered:
    form = "Parquet" if source == "parquet" else "Arrow"
    with open_seekable(str(file)) as stored, readable(display_name(file), form):
        if source == "parquet":
            batches = pq.ParquetFile(stored, pre_buffer=False).iter_batches(BATCH_ROWS)
        else:
            batches = ipc_batches(open_ipc(stored))
        done = 0
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                rows = batch.slice(start, BATCH_ROWS)
                yield range(done + 1, done + 1 + rows.num_rows), rows
                done += rows.num_rows


def _batches(file: Path, source: str, columns: Sequence[str], faults: Faults) -> Numbered:
    """Yields rows of files without types as mappings; adds rows that cannot be read to `faults`."""
    readers = {"csv": _csv_rows, "json": _json_rows, "txt": lambda file: _text_rows(file, columns)}
    rows = readers[source](file)
    while held := list(islice(rows, BATCH_ROWS)):
        good = []
        for number, row in held:
            if isinstance(row, Fault):
                faults.add(display_name(file), row.check, row.description, [row.row], row.value)
            else:
                good.append((number, row))
        if good:
            yield [number for number, _ in good], [row for _, row in good]


def _text_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    if len(columns) > 1:
        message = f"holds a text a line, and the model takes {len(columns)} values: give {' and '.join(columns)} as "
        raise _problem(file, f"{message}columns of a .csv.")
    with open_text(str(file), Data(source="csv", path=str(file))) as raw:
        for number, line in enumerate(raw, 1):
            try:
                yield number, {columns[0]: line.decode().removesuffix("\n").removesuffix("\r")}
            except UnicodeDecodeError:
                yield number, Fault(number, "encoding", "is not UTF-8 text")


def _csv_rows(file: Path) -> Iterator[tuple[int, Any]]:
    parser = CsvParser(str(file), Data(source="csv", path=str(file)))
    names = parser.head.names
    _need_columns(names, (), (), file)
    for part in parser.read_parts(names, names):
        # An empty row among several columns is a blank line, or was left below a table by a spreadsheet.
        kept = pa.array(~empty_rows(part.rows) if len(names) > 1 else [True] * part.rows.num_rows, pa.bool_())
        numbers = pa.array(part.numbers).filter(kept).to_pylist()
        decoded = [decode_texts(column.filter(kept)) for column in part.rows.columns]
        bad = {place for _, places in decoded for place in places}
        texts = zip(*(column.to_pylist() for column, _ in decoded), strict=True)
        for place, (number, row) in enumerate(zip(numbers, texts, strict=True)):
            is_bad = place in bad
            yield (
                number,
                Fault(number, "encoding", "is not UTF-8 text") if is_bad else dict(zip(names, row, strict=True)),
            )
        yield from ((fault.row, fault) for fault in parser.ragged.faults())
    for fault in parser.quotes.take_faults():
        # The predictions are written with the texts as they were read.
        alters_text = fault.check == "stray_quotes" and fault.row in parser.quotes.unclear_rows
        if alters_text or LEVELS[fault.check] == "error":
            yield fault.row, fault


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with open_text(str(file), Data(source="json", path=str(file))) as raw:
        for number, row in json_values(raw, display_name(file)):
            if isinstance(row, dict | Fault):
                yield number, row
            else:
                yield number, Fault(number, "malformed", "is no object", f": {shorten(row)}")


class Writer:
    """A writer of rows with predictions into `file`, in the format of `out`, which it will be renamed to. Closing it
    syncs the file to disk.

    The first batch defines the columns and types of a .csv or .parquet file.
    """

    def __init__(self, file: Path, out: Path, added: Mapping[str, pa.DataType]) -> None:
        self._file, self._final, self._added = file, out, added
        self._cells = [name for name, kind in added.items() if not pa.types.is_nested(kind)]
        self._write = {"csv": self._csv, "json": self._json_lines, "parquet": self._parquet}[_format_of(out)]
        self._columns: dict[str, str] = {}
        """The column name of each prediction."""
        self._stack = ExitStack()
        self._names: list[str] = []
        self._schema: pa.Schema | None = None
        self._out: Any = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if error[0] is None:
            with self._file.open("rb") as file:
                os.fsync(file.fileno())

    def write(self, rows: Rows, predictions: Sequence[Prediction | None]) -> None:
        """Appends rows with a prediction for each, None if there is none. Raises UserError for a row that does not fit
        the first batch in a format with fixed columns."""
        self._columns = self._columns or prediction_names(_names(rows), self._added)
        self._write(rows, predictions)

    def _csv(self, rows: Rows, predictions: Sequence[Prediction | None]) -> None:
        rows = _mappings(rows)
        if self._out is None:
            delimiter = "\t" if self._final.suffix == ".tsv" else ","
            self._out = csv.writer(self._open_text(), delimiter=delimiter, lineterminator="\n")
            self._names = _names(rows)
            self._out.writerow([*self._names, *(self._columns[name] for name in self._cells)])
        self._need_names(rows)
        for row, prediction in zip(rows, predictions, strict=True):
            given = [_cell((prediction or {}).get(name)) for name in self._cells]
            self._out.writerow([*(_cell(row.get(name)) for name in self._names), *given])

    def _json_lines(self, rows: Rows, predictions: Sequence[Prediction | None]) -> None:
        self._out = self._out or self._open_text()
        for row, prediction in zip(_mappings(rows), predictions, strict=True):
            self._out.write(json.dumps(row | self._predictions(prediction), ensure_ascii=False, default=str) + "\n")

    def _parquet(self, rows: Rows, predictions: Sequence[Prediction | None]) -> None:
        batch = rows if isinstance(rows, pa.RecordBatch) else self._typed(rows)
        for name, kind in self._added.items():
            values = [None if prediction is None else prediction[name] for prediction in predictions]
            batch = batch.append_column(pa.field(self._columns[name], kind), pa.array(values, kind))
        if self._out is None:
            self._out = self._stack.enter_context(pq.ParquetWriter(self._file, batch.schema, compression="zstd"))
        self._out.write_batch(batch)

    def _typed(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        """Returns mappings as a batch with the types of the first one."""
        self._names = self._names or _names(rows)
        self._need_names(rows)
        columns = {name: [row.get(name) for row in rows] for name in self._names}
        try:
            if self._schema is None:
                self._schema = pa.RecordBatch.from_pydict(columns).schema
            return pa.RecordBatch.from_pydict(columns, schema=self._schema)
        except pa.ArrowException as error:
            raise _problem(self._final, f"no type holds all values of a column ({error}): write a .jsonl.") from error

    def _need_names(self, rows: list[dict[str, Any]]) -> None:
        if new := next((name for row in rows for name in row if name not in self._names), None):
            message = f"{new!r} is in none of the first {BATCH_ROWS:,} rows, which define the columns"
            raise _problem(self._final, f"{message}: write a .jsonl.")

    def _predictions(self, prediction: Prediction | None) -> dict[str, Any]:
        return {self._columns[name]: None if prediction is None else prediction[name] for name in self._added}

    def _open_text(self) -> Any:
        # Half a surrogate pair is written as JSON escapes it.
        return self._stack.enter_context(self._file.open("w", encoding="utf-8", errors="backslashreplace", newline=""))


def _mappings(rows: Rows) -> list[dict[str, Any]]:
    return rows.to_pylist() if isinstance(rows, pa.RecordBatch) else rows


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _problem(file: Path, message: str) -> UserError:
    return UserError([Problem(kind="data", where=str(file), message=message)])
