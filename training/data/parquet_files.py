"""Rows of Parquet and Arrow files, whose columns have types.

A few bytes of either format may stand for many rows of a long text (dictionaries, compression), texts may be invalid
UTF-8, and a damaged file may crash pyarrow unless its columns are validated first. So columns are made plain in blocks
of bounded size, with texts as bytes, and their unpacked size is counted.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from training.data.arrow_files import BLOCK_ROWS
from training.data.blocks import Block, match_columns, source_error
from training.data.decoding import seekable
from training.data.file_systems import PIECE_BYTES, display_name
from training.data.plain_types import as_bytes, decoded, plain, row_sizes, with_label_names
from training.data.slice_columns import SliceColumns, with_slices
from training.problems import UserError

if TYPE_CHECKING:
    from training.recipe import Data
    from training.recipe.source_columns import SourceColumns

BLOCK_BYTES = 32 * 2**20
LONGEST_ROW_BYTES = 2**30  # twice this is more than an array of texts can hold
_FILE_MARK = b"ARROW1"  # an Arrow file begins with it, a stream does not
# The errors of pyarrow for damaged files.
_DAMAGE = (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError)


def read_parquet(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: SliceColumns) -> Iterator[Block]:
    """Parquet. Label names in the metadata of `datasets` are kept, in their order."""
    data = wanted.data
    for name in pinned[split]:
        where = display_name(name)
        # The columns for slices are read by a second file handle, so that reading ahead serves both.
        others_of = seekable(name) if slices.reading else nullcontext()
        with seekable(name) as source, others_of as aside:
            with _readable(where, "Parquet"):
                file = pq.ParquetFile(source, pre_buffer=False, buffer_size=PIECE_BYTES)
                schema, names, total = file.schema_arrow, file.schema_arrow.names, file.metadata.num_rows
                groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
                unpacked = sum(group.total_byte_size for group in groups)
            _need_room(unpacked, data, where)
            named = match_columns(wanted, names, where)
            batches = _parquet_batches(file, source, list(dict.fromkeys(named.values())))
            blocks = _typed(batches, schema, named, wanted, where, "Parquet", total)
            others = slices.of_file(names, schema.types).items()
            of_others = {
                ours: _sound(_alone(file, aside, theirs), _label_names(schema.metadata, theirs))
                for ours, theirs in others
            }
            yield from with_slices(blocks, of_others, slices)


def _parquet_batches(file: pq.ParquetFile, source: pa.NativeFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    paths = [file.schema.column(place).path for place in range(len(file.schema))]
    places = [n for n, path in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for name in columns)]
    options = {"metadata": file.metadata, "pre_buffer": False, "buffer_size": PIECE_BYTES}
    by_dictionary = pq.ParquetFile(source, read_dictionary=[paths[place] for place in places], **options)
    # pyarrow casts columns that were dictionaries back to them, which fails for invalid UTF-8 unless it is requested.
    # Values of lists stay coded until the number of values a row is known.
    coded = [name for name in columns if types.is_dictionary(file.schema_arrow.field(name).type)]
    coded += [paths[place] for place in places if _stays_coded(file, place, paths[place] in columns)]
    file = pq.ParquetFile(source, read_dictionary=coded, **options)
    for number in range(file.num_row_groups):
        # pyarrow aborts on the metadata of a damaged column, but raises when it reads the column.
        next(file.iter_batches(1, row_groups=[number], columns=columns), None)
        group = file.metadata.row_group(number)
        longest = sum(
            group.column(place).total_uncompressed_size // max(1, group.num_rows)
            if paths[place] in coded and paths[place] not in columns
            else _longest_value(by_dictionary, number, group.column(place))
            for place in places
        )
        most = min(max(1, BLOCK_BYTES // max(1, longest)), BLOCK_ROWS)
        yield from file.iter_batches(most, row_groups=[number], columns=columns)


def _stays_coded(file: pq.ParquetFile, place: int, flat: bool) -> bool:
    """Whether a column within lists or objects can be read as a dictionary in each row group."""
    if flat or file.schema.column(place).physical_type != "BYTE_ARRAY":
        return False
    groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
    return not any("DELTA" in encoding for group in groups for encoding in group.column(place).encodings)


def _alone(file: pq.ParquetFile, source: pa.NativeFile, column: str) -> Iterator[pa.Array]:
    for batch in _parquet_batches(file, source, [column]):
        yield batch.column(column)


def _longest_value(file: pq.ParquetFile, group: int, chunk: pq.ColumnChunkMetaData) -> int:
    """Returns the bytes of a column's value in a row group: the average of plain values, the largest of values that are
    stored once for many rows."""
    size = chunk.total_uncompressed_size
    average = size // max(1, chunk.num_values)
    if size * BLOCK_ROWS <= BLOCK_BYTES or not chunk.physical_type.endswith("BYTE_ARRAY"):
        return average
    if any("DICTIONARY" in encoding for encoding in chunk.encodings):
        first = next(file.iter_batches(1, row_groups=[group], columns=[chunk.path_in_schema]), None)
        if first is None:
            return average
        column = first.column(0)
        if types.is_dictionary(column.type):
            # The first row brings the whole dictionary of its group.
            return average + (pc.max(pc.binary_length(column.dictionary)).as_py() or 0)
        return size
    return size if "DELTA_BYTE_ARRAY" in chunk.encodings else average


def read_arrow(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: SliceColumns) -> Iterator[Block]:
    """Arrow IPC files and streams, also those saved by `datasets`. Label names in their metadata are kept."""
    for name in pinned[split]:
        where = display_name(name)
        with seekable(name) as source:
            with _readable(where, "Arrow"):
                schema = _ipc(source).schema
                names = schema.names
            named = match_columns(wanted, names, where)
            others = slices.of_file(names, schema.types)
            held: dict[str, deque[pa.Array]] = {ours: deque() for ours in others}
            batches = _ipc_batches(source, names, list(named.values()), others, held, slices)
            blocks = _typed(batches, schema, named, wanted, where, "Arrow", None)
            of_others = {
                ours: _sound(iter(held[ours].popleft, None), _label_names(schema.metadata, theirs))
                for ours, theirs in others.items()
            }
            yield from with_slices(blocks, of_others, slices)


def _ipc(source: pa.NativeFile, **options: Any) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    source.seek(0)
    opened = pa.ipc.open_file if source.read(len(_FILE_MARK)) == _FILE_MARK else pa.ipc.open_stream
    source.seek(0)
    return opened(source, options=pa.ipc.IpcReadOptions(**options))


def _ipc_batches(
    source: pa.NativeFile,
    there: list[str],
    needed: list[str],
    others: Mapping[str, str],
    held: Mapping[str, deque[pa.Array]],
    slices: SliceColumns,
) -> Iterator[pa.RecordBatch]:
    """Yields the needed columns. `held` gets the others, read along with them, since a stream is read as a whole."""
    done = 0
    if others:
        with suppress(*_DAMAGE):  # if one of the others is damaged, the needed ones can be read alone
            for batch in _included(source, there, list(dict.fromkeys([*needed, *others.values()]))):
                for ours in filter(slices.reads, others):
                    held[ours].append(batch.column(others[ours]))
                done += 1
                yield batch
            return
    yield from islice(_included(source, there, needed), done, None)


def _included(source: pa.NativeFile, there: list[str], needed: list[str]) -> Iterator[pa.RecordBatch]:
    reader = _ipc(source, included_fields=[there.index(name) for name in needed])
    if isinstance(reader, pa.RecordBatchFileReader):
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from reader


def _typed(
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    named: Mapping[str, str],
    wanted: SourceColumns,
    where: str,
    form: str,
    total: int | None,
) -> Iterator[Block]:
    names = _label_names(schema.metadata, named[wanted.labels.source_name]) if wanted.labels else ()
    kinds = {ours: schema.field(theirs).type for ours, theirs in named.items()}
    rows = pa.RecordBatch.from_pydict({ours: plain(pa.nulls(0, kind)) for ours, kind in kinds.items()})
    empty = Block(where, rows, np.zeros(0, np.int64), names, (), 0.0)
    if any(map(types.is_nested, kinds.values())):
        yield empty  # so that a useless nested column is reported before it is read
    done = size = 0
    for rows in _each(_gathered(_plain_slices(batches, named, where)), where, form):
        numbers = np.arange(done + 1, done + 1 + rows.num_rows, dtype=np.int64)
        done += rows.num_rows
        size += max(rows.nbytes, rows.num_rows)  # a row of nulls counts too
        _need_room(size, wanted.data, where)
        yield Block(where, rows, numbers, names, (), done / total if total else 0.0)
    if not done:
        yield empty  # its types are checked anyway


def _sound(column: Iterator[pa.Array], names: Sequence[str]) -> Iterator[pa.Array]:
    """Yields the same values, validated, with label names for numbers. Raises ArrowInvalid for damaged ones."""
    for values in map(as_bytes, column):
        values.validate(full=True)
        yield with_label_names(values, names)


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


def _need_room(size: int, data: Data, where: str) -> None:
    """Raises UserError for a file that is larger than data.max_file_gb."""
    if size > data.max_file_gb * 1e9:
        message = f"unpacks to {size / 1e9:.3g} GB and more, but may hold {data.max_file_gb:g}: raise data.max_file_gb"
        raise source_error(where, f"{message} if that is intended")


@contextmanager
def _readable(where: str, form: str) -> Iterator[None]:
    """Turns pyarrow's errors of a damaged file into UserError."""
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise source_error(where, f"is not readable as {form}: {reason[:300]}") from error


def _each(batches: Iterator[pa.RecordBatch], where: str, form: str) -> Iterator[pa.RecordBatch]:
    """Yields the same batches. Only errors of reading are blamed on the file, not those of the consumer."""
    while True:
        with _readable(where, form):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _plain_slices(batches: Iterable[pa.RecordBatch], named: Mapping[str, str], where: str) -> Iterator[pa.RecordBatch]:
    """Yields the needed columns, plain, in slices of at most BLOCK_ROWS rows and about BLOCK_BYTES bytes."""
    done = 0
    for batch in batches:
        columns = [as_bytes(batch.column(theirs)) for theirs in named.values()]
        for column in columns:
            column.validate(full=True)
        sums = np.cumsum(sum(row_sizes(column) for column in columns)) if batch.num_rows else np.zeros(0)
        start = 0
        while start < batch.num_rows:
            before = sums[start - 1] if start else 0
            stop = int(np.searchsorted(sums, before + BLOCK_BYTES, "right"))
            stop = min(max(stop, start + 1), start + BLOCK_ROWS, batch.num_rows)
            if sums[stop - 1] - before > LONGEST_ROW_BYTES:
                raise source_error(where, f"holds {sums[stop - 1] - before:,.0f} bytes in row {done + start + 1} alone")
            arrays = [decoded(column.slice(start, stop - start)) for column in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=list(named))
            start = stop
        done += batch.num_rows


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Joins small batches up to BLOCK_ROWS rows and about BLOCK_BYTES bytes."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if held and (rows + batch.num_rows > BLOCK_ROWS or size + batch.nbytes > BLOCK_BYTES):
            yield _joined(held)
            held, rows, size = [], 0, 0
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    if held:
        yield _joined(held)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
