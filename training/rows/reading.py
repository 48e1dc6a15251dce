"""Rows as they stand in their source, a block at a time, with the place of each row for messages.

A reader is a function `(data, split, pinned) -> Iterator[Block]`; READERS names them all. It raises
UserError when the source as a whole cannot be read (no such column, not a Parquet file) and leaves out
single rows that it cannot read, each with a Fault that says why.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from training.ipc import BLOCK_ROWS
from training.problems import Problem, UserError, nearest
from training.rows.sources import load_object, shown, split_names

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

    from training.recipe import Data

LONGEST_CSV_ROW_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Fault:
    """What is wrong with one row, worded to follow "row 7"."""

    row: int
    what: str


@dataclass(frozen=True)
class Block:
    """Some rows of one file (or of the Hub's split, or of the callable)."""

    where: str
    """The source's name for messages."""
    rows: pa.RecordBatch
    """Columns `text`, for pairs `text_pair`, and `label`, all strings as written, null where missing."""
    numbers: Sequence[int]
    """The number of each row in its source, from 1. In CSV the header is row 1; in JSON it is the line."""
    label_names: tuple[str, ...] = ()
    """All labels in order, where the source knows them (ClassLabel)."""
    faults: tuple[Fault, ...] = ()
    """Rows that were left out."""


Reader = Callable[["Data", str, Mapping[str, Any]], Iterator[Block]]


def columns(data: Data) -> dict[str, str]:
    """Our name of each column and the source's."""
    return dict(zip(["text", "text_pair"], data.text, strict=False)) | {"label": data.label}


def read_csv(data: Data, split: str, pinned: Mapping[str, Any]) -> Iterator[Block]:
    """CSV in UTF-8 with a header; every value stays the text it is: `NA`, `1.0`, quoted line breaks."""
    for path in map(Path, pinned[split]):
        yield from _csv_file(path, data)


def _csv_file(path: Path, data: Data) -> Iterator[Block]:
    where, named = shown(path), columns(data)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader(file), None)
    if header is None:
        raise _refused(where, "is empty: its first row must name the columns")
    _need_columns(data, header, where)
    ragged: dict[int, pyarrow.csv.InvalidRow] = {}

    def leave_out(row: pyarrow.csv.InvalidRow) -> str:
        ragged[row.number] = row
        return "skip"

    # One thread, or pyarrow does not know the rows' numbers. Bytes, so that all rows that are no text are
    # found.
    options = {
        "read_options": pyarrow.csv.ReadOptions(use_threads=False, block_size=LONGEST_CSV_ROW_BYTES),
        "parse_options": pyarrow.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=leave_out),
        "convert_options": pyarrow.csv.ConvertOptions(
            include_columns=list(dict.fromkeys(named.values())),
            column_types={name: pa.binary() for name in named.values()},
            strings_can_be_null=False,
        ),
    }
    numbers = (number for number in count(2) if number not in ragged)
    try:
        with pyarrow.csv.open_csv(path, **options) as batches:
            for batch in batches:
                arrays = {ours: batch.column(theirs) for ours, theirs in named.items()}
                yield _block(where, arrays, list(islice(numbers, batch.num_rows)))
    except pa.ArrowInvalid as error:
        raise _refused(where, _csv_trouble(error)) from error
    yield _block(where, _no_rows(named), [], faults=[_ragged(row) for row in ragged.values()])


def _csv_trouble(error: pa.ArrowInvalid) -> str:
    if "straddling" in str(error):
        return f"has a row of more than {LONGEST_CSV_ROW_BYTES} bytes: is a quotation mark never closed?"
    return f"is not readable as CSV: {error}"


def _ragged(row: pyarrow.csv.InvalidRow) -> Fault:
    unclosed = " (is a quotation mark never closed?)" if row.text.count('"') % 2 else ""
    what = f"has {row.actual_columns} fields where the header has {row.expected_columns}{unclosed}"
    return Fault(row.number, what)


def read_json(data: Data, split: str, pinned: Mapping[str, Any]) -> Iterator[Block]:
    """JSON lines: one object a line, in UTF-8; blank lines do not count."""
    for path in map(Path, pinned[split]):
        with path.open("rb") as lines:
            start = lines.read(100).lstrip(b"\xef\xbb\xbf \t\r\n")
            if start.startswith(b"["):
                raise _refused(shown(path), "is one JSON array: write one object a line (JSON lines)")
            lines.seek(0)
            rows = ((number, _parsed(number, line)) for number, line in enumerate(lines, 1) if line.strip())
            yield from from_mappings(rows, data, shown(path))


def _parsed(number: int, line: bytes) -> Any:
    """The value of one line, or what is wrong with it."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Fault(number, "is not UTF-8 text")
    except json.JSONDecodeError as error:
        return Fault(number, f"is not JSON ({error.msg}, column {error.colno})")


def read_parquet(data: Data, split: str, pinned: Mapping[str, Any]) -> Iterator[Block]:
    """Parquet; label names that `datasets` left in the file's metadata are kept, in their order."""
    for path in map(Path, pinned[split]):
        where = shown(path)
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise _refused(where, f"is not readable as Parquet: {error}") from error
        with file:
            stored = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
            feature = stored.get("info", {}).get("features", {}).get(data.label, {})
            names = feature.get("names", []) if feature.get("_type") == "ClassLabel" else []
            _need_columns(data, file.schema_arrow.names, where)
            batches = file.iter_batches(BLOCK_ROWS, columns=list(columns(data).values()))
            yield from _from_tables(batches, file.schema_arrow, data, where, names)


def read_hub(data: Data, split: str, pinned: Mapping[str, Any]) -> Iterator[Block]:
    """A data set of the Hub at the commit that was pinned. `datasets` 5 has no way to run code of its own."""
    if Path(data.path).exists():
        # `datasets` would read the folder instead, whatever the commit.
        message = f"{data.path!r} is also a file or folder here: choose the source csv, json or parquet for it."
        raise UserError([Problem(kind="data", where="data.path", message=message)])
    name, commit = split_names(data)[split], pinned["commit"]
    builder = _hub_builder(data.path, data.config, commit)
    try:
        found = builder.as_dataset(split=name)
    except ValueError as error:
        raise _refused(f"data.splits.{split}", f"{name!r} of {data.path!r} at {commit[:12]}: {error}") from error
    yield from from_dataset(found, data, f"{data.path} ({name})")


@lru_cache(maxsize=1)  # for all splits: a Hub that is gone is waited for once
def _hub_builder(path: str, config: str | None, commit: str) -> DatasetBuilder:
    """A data set of the Hub with all its rows at hand.

    Raises UserError for what the recipe or the data set has wrong, and for the rest what the Hub's clients raise.
    """
    import datasets
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    at = f"{path!r} at {commit[:12]}"
    try:
        builder = datasets.load_dataset_builder(path, config, revision=commit)
    except DatasetNotFoundError as error:
        next_step = "Check the name and the revision, and set HF_TOKEN if it is private or gated"
        raise _refused("data.path", f"{str(error).rstrip('.')}. {next_step}") from error
    except (DatasetsError, EmptyDatasetError) as error:
        raise _refused("data.path", f"{at} is not readable: {error}") from error
    except ValueError as error:  # no such configuration, or several to choose from
        raise _refused("data.config", f"{config!r} of {at}: {error}") from error
    if builder.hash != commit:
        # Where the Hub does not answer, the rows that were read last are taken, of whichever commit they are.
        raise ConnectionError(f"the rows of {path!r} that are stored here are of commit {str(builder.hash)[:12]}")
    try:
        builder.download_and_prepare()
    except DatasetsError as error:
        raise _refused("data.path", f"{at} is not readable: {error.__cause__ or error}") from error
    return builder


def from_dataset(dataset: Dataset, data: Data, where: str) -> Iterator[Block]:
    """The rows of a `datasets.Dataset`, straight from its Arrow tables."""
    _need_columns(data, dataset.column_names, where)
    names = getattr(dataset.features[data.label], "names", [])
    tables = dataset.select_columns(list(columns(data).values())).with_format("arrow")
    yield from _from_tables(tables.iter(BLOCK_ROWS), dataset.features.arrow_schema, data, where, names)


def read_python(data: Data, split: str, pinned: Mapping[str, Any]) -> Iterator[Block]:
    """The mappings that the callable `data.path` gives for the split; it is called once for each."""
    name = split_names(data)[split]
    rows = load_object(data.path)(name)
    where = f"{data.path}({name!r})"
    if not isinstance(rows, Iterable):
        raise _refused(where, f"gave {type(rows).__name__}: it must give an iterable of mappings")
    yield from from_mappings(enumerate(rows, 1), data, where)


def from_mappings(rows: Iterable[tuple[int, Any]], data: Data, where: str) -> Iterator[Block]:
    """Numbered mappings as blocks. The first must have all columns; in a later one, none means no value."""
    rows = iter(rows)
    named = columns(data)
    first = True
    while held := list(islice(rows, BLOCK_ROWS)):
        if first and isinstance(held[0][1], Mapping):
            _need_columns(data, list(held[0][1]), where)
        first = False
        values: list[tuple[str | None, ...]] = []
        numbers: list[int] = []
        faults: list[Fault] = []
        for number, row in held:
            read = _values(number, row, data)
            if isinstance(read, Fault):
                faults.append(read)
            else:
                values.append(read)
                numbers.append(number)
        # Through bytes, because a Python string may hold half a surrogate pair, which is no text.
        encoded = [[_encoded(value) for value in column] for column in zip(*values, strict=True)]
        arrays = dict(zip(named, (pa.array(column, pa.binary()) for column in encoded), strict=False))
        yield _block(where, arrays or _no_rows(named), numbers, faults=faults)


def _values(number: int, row: Any, data: Data) -> tuple[str | None, ...] | Fault:
    """The texts and the label of one row as strings."""
    if isinstance(row, Fault):
        return row
    if not isinstance(row, Mapping):
        return Fault(number, f"is no mapping of columns to values but of type {type(row).__name__}")
    texts = [row.get(name) for name in data.text]
    for name, text in zip(data.text, texts, strict=True):
        if text is not None and not isinstance(text, str):
            return Fault(number, f"holds {type(text).__name__} in column {name!r} where a text belongs")
    label = row.get(data.label)
    if isinstance(label, bool):
        label = str(label).lower()  # as Arrow and JSON write it
    elif label is not None and not isinstance(label, str):
        try:
            label = str(index(label))
        except TypeError:
            kind = type(label).__name__
            return Fault(number, f"holds {kind} in column {data.label!r} where a text or whole number belongs")
    return (*texts, label)


def _encoded(value: str | None) -> bytes | None:
    return None if value is None else value.encode("utf-8", "surrogatepass")


def _from_tables(
    tables: Iterable[pa.Table | pa.RecordBatch],
    schema: pa.Schema,
    data: Data,
    where: str,
    names: Sequence[str],
) -> Iterator[Block]:
    """Typed rows as blocks; whole-number labels become the names that the source has for them."""
    _need_types(schema, data, where)
    places = pa.array([str(place) for place in range(len(names))], pa.string())
    start = 1
    for table in tables:
        arrays = {}
        for ours, theirs in columns(data).items():
            column = table.column(theirs)
            array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
                array = array.cast(pa.string())
                if names and ours == "label":
                    named = pa.array(names, pa.string()).take(pc.index_in(array, value_set=places))
                    array = pc.coalesce(named, array)
            arrays[ours] = array.cast(pa.binary())
        yield _block(where, arrays, range(start, start + table.num_rows), tuple(names))
        start += table.num_rows


def _block(
    where: str,
    arrays: dict[str, pa.Array],
    numbers: Sequence[int],
    label_names: tuple[str, ...] = (),
    faults: Sequence[Fault] = (),
) -> Block:
    """A block of columns of bytes; rows that are not UTF-8 are left out."""
    try:
        decoded = {name: array.cast(pa.string()) for name, array in arrays.items()}
    except pa.ArrowInvalid:
        good = [place for place in range(len(numbers)) if all(_is_utf8(a[place].as_py()) for a in arrays.values())]
        decoded = {name: array.take(pa.array(good, pa.int64())).cast(pa.string()) for name, array in arrays.items()}
        bad = sorted(set(range(len(numbers))).difference(good))
        faults = [*faults, *(Fault(numbers[place], "is not UTF-8 text") for place in bad)]
        numbers = [numbers[place] for place in good]
    rows = pa.RecordBatch.from_pydict(decoded)
    return Block(where, rows, numbers, label_names, tuple(faults))


def _is_utf8(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _no_rows(named: Mapping[str, str]) -> dict[str, pa.Array]:
    return {name: pa.array([], pa.binary()) for name in named}


def _need_columns(data: Data, there: Sequence[str], where: str) -> None:
    """Raises UserError for the columns that the recipe names and the source lacks, or has twice."""
    problems = []
    for name in dict.fromkeys([*data.text, data.label]):
        field = "data.label" if name == data.label else "data.text"
        if there.count(name) > 1:
            message = f"{where} has {there.count(name)} columns called {name!r}: rename all but one."
            problems.append(Problem(kind="data", where=field, message=message))
        elif name not in there:
            near = nearest(name, there)
            message = f"{where} has no column {name!r}: it has {', '.join(there)}.{near}"
            problems.append(Problem(kind="data", where=field, message=message))
    if problems:
        raise UserError(problems)


def _need_types(schema: pa.Schema, data: Data, where: str) -> None:
    """Raises UserError for columns that hold neither text nor, for labels, whole numbers or truths."""
    problems = []
    for name in [*data.text, data.label]:
        kind = schema.field(name).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        good = any(check(kind) for check in _TEXT_TYPES)
        if name == data.label:
            good = good or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        if not good:
            field, wanted = ("data.label", "text or whole numbers") if name == data.label else ("data.text", "text")
            message = f"column {name!r} of {where} is of type {kind}: it must hold {wanted}."
            problems.append(Problem(kind="data", where=field, message=message))
    if problems:
        raise UserError(problems)


_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)


def _refused(where: str, message: str) -> UserError:
    return UserError([Problem(kind="data", where=where, message=f"{message.rstrip('.')}.")])


READERS: dict[str, Reader] = {
    "csv": read_csv,
    "json": read_json,
    "parquet": read_parquet,
    "hub": read_hub,
    "python": read_python,
}
