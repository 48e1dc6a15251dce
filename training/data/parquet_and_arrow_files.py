"""Rows of Parquet and Arrow files, whose columns have types.

Texts may be invalid UTF-8, and a damaged file may crash pyarrow unless its columns are validated first. So texts are
read as bytes, and every column is validated before use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from training.data.arrow_columns import as_bytes, decoded, longest_values, plain, unpacked_sizes
from training.data.decoding import open_seekable
from training.data.file_systems import PIECE_BYTES, display_name
from training.data.ipc_files import BLOCK_ROWS
from training.data.readers import Block, match_columns, source_error
from training.problems import UserError

if TYPE_CHECKING:
    from training.data.readers import ExtraColumns
    from training.recipe.source_columns import SourceColumns

BLOCK_BYTES = 32 * 2**20
"""Of the rows that are in memory at once, unpacked, unless a single row has more."""
LONGEST_BYTES = 8 * BLOCK_BYTES
"""Of a row of Parquet and Arrow, unpacked."""
_OPTIONS = {"pre_buffer": False, "buffer_size": PIECE_BYTES, "page_checksum_verification": True}
_FILE_MARK = b"ARROW1"  # an Arrow file begins with it, a stream does not
# The errors of pyarrow for damaged files.
_DAMAGE = (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError)


def read_parquet(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns) -> Iterator[Block]:
    """Parquet. Label names in the metadata of `datasets` are kept, in their order."""
    for name in pinned[split]:
        where = display_name(name)
        with open_seekable(name) as source:
            with readable(where, "Parquet"):
                file = pq.ParquetFile(source, **_OPTIONS)
                schema = file.schema_arrow
                # pyarrow restores the type of dictionary columns, which fails for invalid UTF-8 unless requested.
                if coded := [field.name for field in schema if types.is_dictionary(field.type)]:
                    file = pq.ParquetFile(source, read_dictionary=coded, **_OPTIONS)
                # By the schema: pyarrow ends the process when it describes a damaged column of a row group.
                stored = [file.schema.column(number) for number in range(len(file.schema))]
                texts = [column.path for column in stored if column.physical_type == "BYTE_ARRAY"]
                numbered = pq.ParquetFile(source, read_dictionary=texts, **_OPTIONS)

            def read(
                columns: Callable[[], list[str]], file: pq.ParquetFile = file, numbered: pq.ParquetFile = numbered
            ) -> Iterator[pa.RecordBatch]:
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    most = BLOCK_BYTES * group.num_rows // max(1, group.total_byte_size)
                    most = min(most, BLOCK_BYTES // max(1, _longest_row(numbered, number, columns())))
                    rows = min(max(1, most), BLOCK_ROWS)
                    yield from file.iter_batches(rows, row_groups=[number], columns=columns())

            yield from _blocks(read, schema, wanted, slices, where, "Parquet", file.metadata.num_rows)


def _longest_row(numbered: pq.ParquetFile, group: int, columns: list[str]) -> int:
    """Returns the bytes of a row with the longest texts that a row group stores once and refers to by number: a few
    bytes may refer to one long text for each of millions of rows. A row has as many of them as the first one."""
    first = next(numbered.iter_batches(1, row_groups=[group], columns=columns), None)
    return 0 if first is None else sum(longest_values(_checked(column)) for column in first.columns)


def bounded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the same rows in batches of at most BLOCK_ROWS, and BLOCK_BYTES when dictionaries are replaced by their
    values.

    Raises ValueError for a row of more than LONGEST_BYTES.
    """
    for batch in batches:
        coded = [column for column in batch.columns if "dictionary<" in str(column.type)]
        sizes = sum((unpacked_sizes(_checked(column)) for column in coded), np.zeros(batch.num_rows))
        if batch.num_rows and sizes.max() > LONGEST_BYTES:
            most = f"{LONGEST_BYTES / 1e6:,.0f} MB"
            raise ValueError(f"a row unpacks to {sizes.max() / 1e6:,.0f} MB, and may have {most}")
        start, before = 0, np.append(0, np.cumsum(sizes))
        while start < batch.num_rows:
            end = int(np.searchsorted(before, before[start] + BLOCK_BYTES, side="right")) - 1
            end = min(max(end, start + 1), start + BLOCK_ROWS, batch.num_rows)
            yield batch.slice(start, end - start)
            start = end


def read_arrow(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns) -> Iterator[Block]:
    """Arrow IPC files and streams, also those saved by `datasets`. Label names in their metadata are kept."""
    for name in pinned[split]:
        where = display_name(name)
        with open_seekable(name) as source:
            with readable(where, "Arrow"):
                schema = open_ipc(source).schema

            def read(
                columns: Callable[[], list[str]], source: pa.NativeFile = source, names: list[str] = schema.names
            ) -> Iterator[pa.RecordBatch]:
                yield from ipc_batches(open_ipc(source, included_fields=[names.index(column) for column in columns()]))

            yield from _blocks(read, schema, wanted, slices, where, "Arrow", None)


def open_ipc(source: pa.NativeFile, **options: Any) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """Opens an Arrow file or stream."""
    source.seek(0)
    opener = pa.ipc.open_file if source.read(len(_FILE_MARK)) == _FILE_MARK else pa.ipc.open_stream
    source.seek(0)
    return opener(source, options=pa.ipc.IpcReadOptions(**options))


def ipc_batches(reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    """Yields the record batches of an Arrow file or stream."""
    if isinstance(reader, pa.RecordBatchFileReader):
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from reader


def _blocks(
    read: Callable[[Callable[[], list[str]]], Iterator[pa.RecordBatch]],
    schema: pa.Schema,
    wanted: SourceColumns,
    slices: ExtraColumns,
    where: str,
    form: str,
    total: int | None,
) -> Iterator[Block]:
    """Yields the rows that `read` returns for a list of columns: the needed ones, and those for slices while they are
    read."""
    named = match_columns(wanted, schema.names, where)
    others = slices.of_file(schema.names, schema.types)
    label_names = _label_names(schema.metadata, named[wanted.labels.source_name]) if wanted.labels else ()

    def columns() -> list[str]:
        read_now = [theirs for ours, theirs in others.items() if slices.reads(ours)]
        return list(dict.fromkeys([*named.values(), *read_now]))

    parts = bounded(read(columns))
    done = size = 0
    while True:
        with readable(where, form):  # not around `yield`: errors of the consumer are not those of the file
            part = next(parts, None)
            if part is None:
                break
            rows = pa.RecordBatch.from_pydict({ours: _validate(part.column(theirs)) for ours, theirs in named.items()})
            values = {
                ours: slices.of_array(_checked(part.column(theirs)), _label_names(schema.metadata, theirs))
                for ours, theirs in others.items()
                if slices.reads(ours)
            }
        numbers = np.arange(done + 1, done + 1 + rows.num_rows, dtype=np.int64)
        done += rows.num_rows
        size += max(rows.nbytes, rows.num_rows)  # a row of nulls counts too
        if size > wanted.data.max_file_gb * 1e9:
            message = f"unpacks to {size / 1e9:.3g} GB and more, but may hold {wanted.data.max_file_gb:g}: "
            raise source_error(where, f"{message}raise data.max_file_gb if that is intended")
        yield Block(where, rows, numbers, label_names, (), done / total if total else 0.0, values)
    if not done:  # the types are checked anyway
        empty = {ours: plain(pa.nulls(0, schema.field(theirs).type)) for ours, theirs in named.items()}
        yield Block(where, pa.RecordBatch.from_pydict(empty), np.zeros(0, np.int64), label_names)


def _validate(column: pa.Array) -> pa.Array:
    return decoded(as_bytes(_checked(column)))


def _checked(column: pa.Array) -> pa.Array:
    """Returns the column. Raises pyarrow's error if it is damaged; its texts may be invalid UTF-8."""
    as_bytes(column).validate(full=True)
    return column


def _label_names(metadata: Mapping[bytes, bytes] | None, column: str) -> tuple[str, ...]:
    """Returns the label names in the metadata of `datasets`, in order; none if there are none."""
    try:
        stored = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    except (ValueError, RecursionError):
        return ()
    match stored:
        case {"info": {"features": {**features}}}:
            match features.get(column):
                case (
                    {"_type": "ClassLabel", "names": [*names]}
                    | {"feature": {"_type": "ClassLabel", "names": [*names]}}  # for each entry of a list
                    | [{"_type": "ClassLabel", "names": [*names]}]
                ) if all(isinstance(name, str) for name in names):
                    return tuple(names)
    return ()


@contextmanager
def readable(where: str, form: str) -> Iterator[None]:
    """Turns pyarrow's errors of a damaged file into UserError."""
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise source_error(where, f"is not readable as {form}: {reason[:300]}") from error
