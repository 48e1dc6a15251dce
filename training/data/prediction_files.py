"""Files of rows to predict, read in batches and written with the predictions.

| format | its rows | predictions written |
|---|---|---|
| .txt | a text a line | no: it has no columns |
| .csv, .tsv | a header, then as many fields a row; lists and objects as JSON | those that are no list and no object |
| .jsonl | an object a line | all |
| .parquet | as they are typed | all |

All files are UTF-8. The columns of predictions have the names of `TaskType.record_types`; `label` becomes
`predicted_label` if the first rows have a column `label`.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from training.data.file_systems import as_user_error
from training.data.lists import as_json, from_json
from training.problems import Problem, UserError, nearest
from training.recipe.column_types import EXAMPLES, Form

DELIMITERS = {".csv": ",", ".tsv": "\t"}
READ = (".txt", *DELIMITERS, ".jsonl", ".parquet")
WRITTEN = READ[1:]
BATCH_ROWS = 2048
LONGEST_LINE = 2**26  # characters

Rows: TypeAlias = pa.RecordBatch | list[dict[str, Any]]
"""A record batch of Parquet, which keeps its types; mappings of other formats."""
Numbered: TypeAlias = Iterator[tuple[Sequence[int], Rows]]
Values = tuple[Any, ...]
Answer = Mapping[str, Any]
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
    no rows; and for the first row that does not fit.
    """
    needed, answers = [name for name in columns if name not in optional], None
    with as_user_error(str(file)):
        for numbers, rows in _READERS[file.suffix](file, needed):
            first = answers is None
            answers = answers or answer_names(_names(rows), added)
            _need_columns(_names(rows), needed if first else (), answers.values(), file)
            yield Batch(rows, _inputs(numbers, rows, columns, blank, file), numbers)
    if answers is None:
        raise _problem(file, "holds no rows.")


def answer_names(there: Collection[str], added: Iterable[str]) -> dict[str, str]:
    """Returns the column name of each prediction in a file with these columns."""
    return {name: f"predicted_{name}" if name in there else name for name in added}


def _names(rows: Rows) -> list[str]:
    if isinstance(rows, pa.RecordBatch):
        return list(rows.schema.names)
    return list(dict.fromkeys(name for row in rows for name in row))


def _inputs(
    numbers: Sequence[int], rows: Rows, columns: Mapping[str, Form], blank: Collection[str], file: Path
) -> list[Values | None]:
    if isinstance(rows, pa.RecordBatch):
        nothing = pa.nulls(rows.num_rows)
        by_column = [(rows.column(name) if name in _names(rows) else nothing).to_pylist() for name in columns]
    else:
        by_column = [[row.get(name) for row in rows] for name in columns]
    found: list[Values | None] = []
    for number, values in zip(numbers, zip(*by_column, strict=True), strict=True):
        given = [
            need_value(value, form, "data", str(file), f"row {number} has {value!r:.60} in column {name!r}")
            for (name, form), value in zip(columns.items(), values, strict=True)
        ]
        found.append(whole(given, columns, blank))
    return found


def whole(values: Sequence[Any], columns: Mapping[str, Form], blank: Collection[str] = ()) -> Values | None:
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
        if not _is_text(value):
            raise UserError([Problem(kind=kind, where=where, message=f"{subject}, where a text belongs.")])
        return value
    if form == "number":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError([Problem(kind=kind, where=where, message=f"{subject}, where a number belongs.")])
        return number
    column, wrong = from_json(pa.array([value if isinstance(value, str) else as_json(value)]), "", form)
    if wrong:
        raise UserError(
            [Problem(kind=kind, where=where, message=f"{subject}, where such as {EXAMPLES[form]} belongs.")]
        )
    return column[0].as_py() or None


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


def _text_lines(file: Path, columns: Sequence[str]) -> Numbered:
    if len(columns) > 1:
        message = f"holds a text a line, and the model takes {len(columns)} values: give {' and '.join(columns)} as "
        raise _problem(file, f"{message}columns of a .csv.")
    return _batched((number, {columns[0]: line.removesuffix("\n")}) for number, line in _lines(file))


def _csv(file: Path, columns: Sequence[str]) -> Numbered:
    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        before = csv.field_size_limit(LONGEST_LINE)  # it is the whole process's
        lines = (line for _, line in _lines(file, newline=""))
        reader = csv.reader(lines, delimiter=DELIMITERS[file.suffix], strict=True)
        header: list[str] = []
        try:
            for number, fields in enumerate(reader, 1):
                if not header:
                    header = fields
                    _need_columns(header, columns if header else (), (), file)
                elif len(fields) == len(header):
                    yield number, dict(zip(header, fields, strict=True))
                elif fields:
                    raise _problem(file, f"row {number} has {len(fields)} fields, and its header {len(header)}.")
        except csv.Error as error:
            raise _problem(file, f"is no CSV at line {reader.line_num}: {error}.") from error
        finally:
            csv.field_size_limit(before)

    return _batched(rows())


def _json_lines(file: Path, columns: Sequence[str]) -> Numbered:
    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in _lines(file):
            try:
                row = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError) as error:
                raise _problem(file, f"line {number} is not JSON: {error}.") from error
            if isinstance(row, dict):
                yield number, row
            elif row is not None or line.strip():
                raise _problem(file, f"line {number} is no object but {line.strip():.60}: write an object a line.")

    return _batched(rows())


def _parquet(file: Path, columns: Sequence[str]) -> Numbered:
    try:
        with pq.ParquetFile(file, pre_buffer=False) as opened:
            number = 1
            for rows in opened.iter_batches(BATCH_ROWS):
                yield range(number, number + rows.num_rows), rows
                number += rows.num_rows
    except pa.ArrowException as error:
        raise _problem(file, f"is not readable as Parquet: {error}.") from error


def _lines(file: Path, newline: str | None = None) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8-sig", newline=newline) as lines:
        try:
            yield from enumerate(iter(lambda: lines.readline(LONGEST_LINE), ""), 1)
        except UnicodeDecodeError as error:
            raise _problem(file, f"is not UTF-8 text: byte 0x{error.object[error.start]:02x}.") from error


def _batched(rows: Iterable[tuple[int, dict[str, Any]]]) -> Numbered:
    rows = iter(rows)
    while held := list(islice(rows, BATCH_ROWS)):
        yield [number for number, _ in held], [row for _, row in held]


_READERS: dict[str, Callable[[Path, Sequence[str]], Numbered]] = {
    ".txt": _text_lines,
    **dict.fromkeys(DELIMITERS, _csv),
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}


class Writer:
    """A writer of rows with predictions into `file`, in the format of `out`, which it will be renamed to. Closing it
    syncs the file to disk.

    The first batch defines the columns and types of a .csv or .parquet file.
    """

    def __init__(self, file: Path, out: Path, added: Mapping[str, pa.DataType]) -> None:
        self._file, self._final, self._added = file, out, added
        self._cells = [name for name, kind in added.items() if not pa.types.is_nested(kind)]
        formats = dict.fromkeys(DELIMITERS, self._csv)
        self._write = {**formats, ".jsonl": self._json_lines, ".parquet": self._parquet}[out.suffix]
        self._called: dict[str, str] | None = None
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

    def write(self, rows: Rows, answers: Sequence[Answer | None]) -> None:
        """Appends rows with a prediction for each, None if there is none. Raises UserError for a row that does not fit
        the first batch in a format with fixed columns."""
        self._called = self._called or answer_names(_names(rows), self._added)
        self._write(rows, answers)

    def _csv(self, rows: Rows, answers: Sequence[Answer | None]) -> None:
        rows = _mappings(rows)
        if self._out is None:
            delimiter = DELIMITERS[self._final.suffix]
            self._out = csv.writer(self._opened_text(), delimiter=delimiter, lineterminator="\n")
            self._names = _names(rows)
            self._out.writerow([*self._names, *(self._name(name) for name in self._cells)])
        self._need_names(rows)
        for row, answer in zip(rows, answers, strict=True):
            given = [_cell((answer or {}).get(name)) for name in self._cells]
            self._out.writerow([*(_cell(row.get(name)) for name in self._names), *given])

    def _json_lines(self, rows: Rows, answers: Sequence[Answer | None]) -> None:
        self._out = self._out or self._opened_text()
        for row, answer in zip(_mappings(rows), answers, strict=True):
            self._out.write(json.dumps(row | self._whole(answer), ensure_ascii=False, default=str) + "\n")

    def _parquet(self, rows: Rows, answers: Sequence[Answer | None]) -> None:
        batch = rows if isinstance(rows, pa.RecordBatch) else self._typed(rows)
        for name, kind in self._added.items():
            values = [None if answer is None else answer[name] for answer in answers]
            batch = batch.append_column(pa.field(self._name(name), kind), pa.array(values, kind))
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

    def _whole(self, answer: Answer | None) -> dict[str, Any]:
        return {self._name(name): None if answer is None else answer[name] for name in self._added}

    def _name(self, name: str) -> str:
        return (self._called or {})[name]

    def _opened_text(self) -> Any:
        # Half a surrogate pair is written as JSON escapes it.
        return self._stack.enter_context(self._file.open("w", encoding="utf-8", errors="backslashreplace", newline=""))


def _mappings(rows: Rows) -> list[dict[str, Any]]:
    return rows.to_pylist() if isinstance(rows, pa.RecordBatch) else rows


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _problem(file: Path, message: str) -> UserError:
    return UserError([Problem(kind="data", where=str(file), message=message)])
