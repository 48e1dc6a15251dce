"""Files of rows that a model is asked about: read some rows at a time, and written again with its answers.

| format | its rows | with answers |
|---|---|---|
| .txt | a text a line | no: it has no columns |
| .csv | a header, then as many fields a row | `label` and `probability`, that of the label |
| .jsonl | an object a line | these, and `probabilities`, by label |
| .parquet | as they are typed | the same |

All of them in UTF-8.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from training.problems import Problem, UserError, nearest
from training.rows.urls import told

READ = (".txt", ".csv", ".jsonl", ".parquet")
WRITTEN = READ[1:]
ADDED = ("label", "probability", "probabilities")
BATCH_ROWS = 2048
LONGEST_LINE = 2**26  # characters

Rows: TypeAlias = pa.RecordBatch | list[dict[str, Any]]
"""Arrow's of Parquet, so that types stay what they are; mappings of the others."""
Numbered: TypeAlias = Iterator[tuple[Sequence[int], Rows]]
Texts = tuple[str, ...]
Answer = Mapping[str, float]
"""The probability of each label."""


class Batch(NamedTuple):
    """Some rows of a file."""

    rows: Rows
    texts: list[Texts | None]
    """The text or texts of each row; None for a row that lacks one."""


def read(file: Path, columns: Sequence[str]) -> Iterator[Batch]:
    """The rows of the file in order, with the texts of these columns; in a .txt file there is only the first of them.

    Raises UserError for a file that cannot be read, lacks a column, has one of ADDED, or holds no rows; and for the
    first row that is not as the others.
    """
    first = True
    with told(str(file)):
        for numbers, rows in _READERS[file.suffix](file, columns):
            _need_columns(_names(rows), columns if first else (), file)
            first = False
            yield Batch(rows, _texts(numbers, rows, columns, file))
    if first:
        raise _problem(file, "holds no rows.")


def _names(rows: Rows) -> list[str]:
    if isinstance(rows, pa.RecordBatch):
        return list(rows.schema.names)
    return list(dict.fromkeys(name for row in rows for name in row))


def _texts(numbers: Sequence[int], rows: Rows, columns: Sequence[str], file: Path) -> list[Texts | None]:
    if isinstance(rows, pa.RecordBatch):
        by_column = [rows.column(name).to_pylist() for name in columns]
    else:
        by_column = [[row.get(name) for row in rows] for name in columns]
    found: list[Texts | None] = []
    for number, texts in zip(numbers, zip(*by_column, strict=True), strict=True):
        for name, text in zip(columns, texts, strict=True):
            if text is not None and not _is_text(text):
                raise _problem(file, f"row {number} has {text!r:.60} in column {name!r}, where a text belongs.")
        found.append(texts if all(text and text.strip() for text in texts) else None)
    return found


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:  # half of a character, which JSON can write
        return False


def _need_columns(there: Sequence[str], columns: Sequence[str], file: Path) -> None:
    """Raises UserError with all that is wrong with the names of a file's columns."""
    said = [f"has two columns {name!r}: rename one." for name in dict.fromkeys(there) if there.count(name) > 1]
    for name in columns:
        if name not in there:
            said.append(f"has no column {name!r}: it has {', '.join(there)}.{nearest(name, there)}")
    for name in ADDED:
        if name in there:
            said.append(f"has a column {name!r}, which is what part of the answer is called: rename or drop it.")
    if said:
        raise UserError([Problem(kind="data", where=str(file), message=one) for one in said])


def _text_lines(file: Path, columns: Sequence[str]) -> Numbered:
    if len(columns) > 1:
        message = f"holds a text a line, and the model takes two: give {' and '.join(columns)} as columns of a .csv."
        raise _problem(file, message)
    return _batched((number, {columns[0]: line.removesuffix("\n")}) for number, line in _lines(file))


def _csv(file: Path, columns: Sequence[str]) -> Numbered:
    csv.field_size_limit(LONGEST_LINE)

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        reader = csv.reader((line for _, line in _lines(file, newline="")), strict=True)
        header: list[str] = []
        try:
            for number, fields in enumerate(reader, 1):
                if not header:
                    header = fields
                    _need_columns(header, columns if header else (), file)
                elif len(fields) == len(header):
                    yield number, dict(zip(header, fields, strict=True))
                elif fields:
                    raise _problem(file, f"row {number} has {len(fields)} fields, and its header {len(header)}.")
        except csv.Error as error:
            raise _problem(file, f"is no CSV at line {reader.line_num}: {error}.") from error

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
    ".csv": _csv,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}


class Writer:
    """Writes rows with answers into `file`, in the format of `out`, which it is to become; the disk holds them when it
    is closed.

    The first batch says which columns a .csv or .parquet file has, and of which types.
    """

    def __init__(self, file: Path, out: Path, labels: Sequence[str]) -> None:
        self._file, self._final, self._labels = file, out, labels
        self._write = {".csv": self._csv, ".jsonl": self._json_lines, ".parquet": self._parquet}[out.suffix]
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
        """Appends rows, an answer for each, None for no answer. Raises UserError for a row that does not fit the first
        ones, in a format in which it must."""
        self._write(rows, answers)

    def _csv(self, rows: Rows, answers: Sequence[Answer | None]) -> None:
        rows = _mappings(rows)
        if self._out is None:
            self._out = csv.writer(self._opened_text(), lineterminator="\n")
            self._names = _names(rows)
            self._out.writerow([*self._names, *ADDED[:2]])
        self._need_names(rows)
        for row, answer in zip(rows, answers, strict=True):
            self._out.writerow([*(_cell(row.get(name)) for name in self._names), *_best(answer)])

    def _json_lines(self, rows: Rows, answers: Sequence[Answer | None]) -> None:
        self._out = self._out or self._opened_text()
        for row, answer in zip(_mappings(rows), answers, strict=True):
            whole = row | dict(zip(ADDED, (*_best(answer), self._ordered(answer)), strict=True))
            self._out.write(json.dumps(whole, ensure_ascii=False, default=str) + "\n")

    def _parquet(self, rows: Rows, answers: Sequence[Answer | None]) -> None:
        batch = rows if isinstance(rows, pa.RecordBatch) else self._typed(rows)
        kinds = (pa.string(), pa.float64(), pa.struct([(label, pa.float64()) for label in self._labels]))
        columns = zip(*((*_best(answer), self._ordered(answer)) for answer in answers), strict=True)
        for name, kind, values in zip(ADDED, kinds, columns, strict=True):
            batch = batch.append_column(pa.field(name, kind), pa.array(values, kind))
        if self._out is None:
            self._out = self._stack.enter_context(pq.ParquetWriter(self._file, batch.schema, compression="zstd"))
        self._out.write_batch(batch)

    def _typed(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        """Mappings as a batch of the types of the first one."""
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
            message = f"{new!r} is in none of the first {BATCH_ROWS:,} rows, which say which columns there are"
            raise _problem(self._final, f"{message}: write a .jsonl.")

    def _ordered(self, answer: Answer | None) -> dict[str, float] | None:
        return None if answer is None else {label: answer[label] for label in self._labels}

    def _opened_text(self) -> Any:
        # Half a character is written as JSON escapes it.
        return self._stack.enter_context(self._file.open("w", encoding="utf-8", errors="backslashreplace", newline=""))


def _mappings(rows: Rows) -> list[dict[str, Any]]:
    return rows.to_pylist() if isinstance(rows, pa.RecordBatch) else rows


def _best(answer: Answer | None) -> tuple[str | None, float | None]:
    return (None, None) if answer is None else max(answer.items(), key=lambda pair: pair[1])


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _problem(file: Path, message: str) -> UserError:
    return UserError([Problem(kind="data", where=str(file), message=message)])
