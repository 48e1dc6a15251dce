"""Columns beside those of the task type, by which rows of validation and test can be told apart: what slices are made
of.

Kept is every column of text, whole numbers or truths that has few different values, whether a recipe names it or not:
one that is named later needs no row read anew. Every other column is left out, with the reason; whatever is wrong with
a column that nobody named, the rows are read all the same.

Memory holds the different values of each column. Those of the rows wait on disk, each as its place among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from training.data.arrow_files import BLOCK_ROWS, in_blocks, ipc_writer
from training.data.blocks import Block, Numbers
from training.data.plain_types import as_bytes, decoded, row_sizes
from training.problems import NETWORK, UserError

if TYPE_CHECKING:
    from training.recipe.source_columns import SourceColumns

MAX_VALUES = 1000
MAX_BYTES = 256  # of a value
MAX_COLUMNS = 100  # of those that can be kept by their type

Places = np.ndarray[Any, np.dtype[np.int32]]
"""Of each row's value among the different ones; -1 where there is none."""

_FIT = (types.is_string, types.is_large_string, types.is_string_view, types.is_integer, types.is_boolean, types.is_null)
_SORTS = {"truth": types.is_boolean, "number": types.is_integer}
MIXED = "holds values of more than one type"
NOT_READ = "cannot be read"


class Unfit(Exception):
    """Why a column is left out, worded to follow its name."""


class SliceColumns:
    """What one load learns of these columns: readers ask it which of them to read, and tell it of those they cannot.

    A column that is left out of one split is left out of all.
    """

    def __init__(self, wanted: SourceColumns, folder: Path) -> None:
        self._wanted, self._folder = wanted, folder
        self._source = ""
        self._splits: tuple[str, ...] = ()
        self._of_files: dict[str, str] | None = None
        self._seen: dict[str, None] = {}
        self._left_out: dict[str, str] = {}
        self._found: dict[str, dict[str, _Column]] = {}
        self._files = count()

    def begin(self, source: str, splits: Iterable[str]) -> None:
        """That the split `source` is read next, whose rows go into `splits` of those that are judged, if any do."""
        self._source, self._splits, self._of_files = source, tuple(splits), None
        self._found |= {split: {} for split in self._splits}

    @property
    def reading(self) -> bool:
        """Whether any column of what is read now is wanted."""
        return bool(self._splits)

    def of_file(self, there: Sequence[str], task_types: Sequence[pa.DataType] = ()) -> dict[str, str]:
        """Which columns of a file to read for slices: the recipe's name of each, and the file's.

        To be asked once for each file; `there` is all its columns, `task types` their types where it knows them.
        """
        renamed = [self._wanted.data.rename.get(name, name) for name in there]
        own = self._wanted.by_source
        found = {ours: theirs for ours, theirs in zip(renamed, there, strict=True) if ours not in own}
        self._seen |= dict.fromkeys(found)
        for ours, task_type in zip(renamed, task_types, strict=False):
            if not _can_be(task_type):
                self.leave_out(ours, f"is of type {str(task_type).partition('<')[0]}")
        times = Counter(renamed)
        for ours in found:
            if times[ours] > 1:
                self.leave_out(ours, "is there more than once")
            elif not _is_name(ours):
                self.leave_out(ours, "has no name that is text")
        for ours in found.keys() ^ (found if self._of_files is None else self._of_files).keys():
            self.leave_out(ours, f"is in some files of {self._source} only")
        for ours in list(filter(self.reads, found))[MAX_COLUMNS:]:
            self.leave_out(ours, f"stands behind {MAX_COLUMNS} other columns")
        self._of_files = found
        return {ours: theirs for ours, theirs in found.items() if self.reads(ours)} if self.reading else {}

    def reads(self, name: str) -> bool:
        """Whether the column's values are still wanted."""
        return name not in self._left_out

    def leave_out(self, name: str, why: str) -> None:
        """That the column is not kept."""
        if self.reading and self.reads(name) and name not in self._wanted.by_source:
            self._seen[name] = None
            self._left_out[name] = why
            for columns in self._found.values():
                if column := columns.pop(name, None):
                    column.file.unlink(missing_ok=True)

    def add(self, split: str, block: Block) -> None:
        """Keeps what the rows of a split have in the columns that are read."""
        if not block.rows.num_rows or split not in self._splits:
            return
        for name in filter(self.reads, self._of_files or ()):
            column = self._found[split].get(name) or _Column(self._folder / f"slice-{next(self._files)}")
            try:
                places = column.places_of(block.slices[name].chunks if name in block.slices else [])
                if len(places) < block.rows.num_rows:
                    raise Unfit(NOT_READ)
            except (Unfit, pa.ArrowException) as error:
                self.leave_out(name, str(error) if isinstance(error, Unfit) else NOT_READ)
                continue
            self._found[split][name] = column
            with column.file.open("ab") as file:
                file.write(places.tobytes())

    def write(self, split: str, final: Path, removed: Numbers) -> None:
        """Writes the columns of a split that are kept to the file `final`, if there are any, without the rows `gone`:
        their places among all that were added, in order."""
        kept = self.summary()["kept"]
        columns = {name: column for name, column in self._found.get(split, {}).items() if name in kept}
        if not columns:
            return
        values = [column.values(removed) for column in columns.values()]
        batches = zip(
            *(column.read(removed, of) for column, of in zip(columns.values(), values, strict=True)), strict=True
        )
        coded = pa.schema([(name, pa.int32()) for name in columns])
        blocks = in_blocks((pa.RecordBatch.from_arrays(list(arrays), schema=coded) for arrays in batches), coded)
        schema = pa.schema([(name, pa.dictionary(pa.int32(), pa.string())) for name in columns])
        with ipc_writer(final, schema) as writer:
            for block in blocks:
                arrays = map(pa.DictionaryArray.from_arrays, block.columns, values)
                writer.write(pa.RecordBatch.from_arrays(list(arrays), schema=schema))

    def summary(self) -> dict[str, Any]:
        """The names of the columns `kept`, and of those `left_out` with the reason."""
        why = dict(self._left_out)
        for name in self._seen:
            found = [columns[name] for columns in self._found.values() if name in columns]
            if name not in why and not any(column.places for column in found):
                why[name] = "holds no value" if found else "is in train only"
        left_out = {_written(name): why[name] for name in self._seen if name in why}
        return {"kept": [name for name in self._seen if name not in why], "left_out": left_out}


@dataclass
class _Column:
    """What one split has in one column."""

    file: Path
    """Of Places."""
    places: dict[str, int] = field(default_factory=dict)
    sort: str = ""

    def places_of(self, chunks: Iterable[pa.Array]) -> Places:
        """Of these values, of which new ones are added. Raises Unfit and ArrowException for what is not kept."""
        return np.concatenate([np.zeros(0, np.int32), *map(self._places_of, chunks)])

    def _places_of(self, chunk: pa.Array) -> Places:
        column = as_bytes(chunk)
        _need_short(column)
        coded = decoded(column).dictionary_encode()
        task_type = coded.type.value_type
        if not types.is_null(task_type):
            sort = next((sort for sort, check in _SORTS.items() if check(task_type)), "text")
            self.sort = self.sort or sort
            if sort != self.sort:
                raise Unfit(MIXED)
        spelt = map(_spelt, coded.dictionary.to_pylist())
        places = [-1 if text is None else self.places.setdefault(text, len(self.places)) for text in spelt]
        if len(self.places) > MAX_VALUES:
            raise Unfit(f"has more than {MAX_VALUES:,} different values")
        return np.array([*places, -1], np.int32)[coded.indices.fill_null(-1).to_numpy()]

    def values(self, removed: Numbers) -> pa.Array:
        """The different values of the rows that are still there, in order."""
        there = {place for places in self._without(removed) for place in np.unique(places).tolist()}
        return pa.array(sorted(text for text, place in self.places.items() if place in there), pa.string())

    def read(self, removed: Numbers, values: pa.Array) -> Iterator[pa.Array]:
        """The place of each of these rows among `values`, null for none."""
        final = np.zeros(len(self.places) + 1, np.int32)
        final[[self.places[text] for text in values.to_pylist()]] = np.arange(len(values))
        for places in self._without(removed):
            yield pa.array(final[places], mask=places < 0)

    def _without(self, removed: Numbers) -> Iterator[Places]:
        with self.file.open("rb") as file:
            for start in count(0, BLOCK_ROWS):
                places = np.frombuffer(file.read(4 * BLOCK_ROWS), np.int32)
                if not len(places):
                    return
                first, last = np.searchsorted(removed, [start, start + BLOCK_ROWS])
                yield np.delete(places, removed[first:last] - start)


def with_slices(
    blocks: Iterable[Block], columns: Mapping[str, Iterator[pa.Array]], slices: SliceColumns
) -> Iterator[Block]:
    """The blocks with as many values of each column, which is read no further than it is wanted: what is wrong with one
    leaves out that one alone."""
    held = {name: _Held(values) for name, values in columns.items()}
    for block in blocks:
        found: dict[str, pa.ChunkedArray] = {}
        for name in filter(slices.reads, held) if block.rows.num_rows else ():
            try:
                found[name] = held[name].take(block.rows.num_rows)
            except Exception as error:  # as many sorts as there are sorts of damage, and libraries that read
                if isinstance(error, UserError) and error.problems[0].kind == NETWORK:
                    raise
                slices.leave_out(name, str(error) if isinstance(error, Unfit) else NOT_READ)
        yield replace(block, slices=found)


class _Held:
    """Values in chunks of any size, taken in others."""

    def __init__(self, chunks: Iterator[pa.Array]) -> None:
        self._chunks, self._rest = chunks, pa.nulls(0)

    def take(self, rows: int) -> pa.ChunkedArray:
        """The next values. Raises StopIteration where there are fewer."""
        taken = []
        while rows:
            chunk = self._rest if len(self._rest) else _filterable(next(self._chunks))
            taken.append(chunk[:rows])
            self._rest = chunk[rows:]
            rows -= len(taken[-1])
        return pa.chunked_array(taken)


def _filterable(values: pa.Array) -> pa.Array:
    """The same values in a type of which Arrow can take some: it cannot out of views."""
    column = as_bytes(values)
    if types.is_binary_view(column.type):
        _need_short(column)
        return decoded(column)
    return column


def _need_short(column: pa.Array) -> None:
    """Raises Unfit where a value is too long: before it is unpacked, which may be many times over."""
    if len(column) and row_sizes(column).max() > MAX_BYTES + 8:
        raise Unfit(f"has values of more than {MAX_BYTES} bytes")


def _can_be(task_type: pa.DataType) -> bool:
    if isinstance(task_type, pa.BaseExtensionType):
        task_type = task_type.storage_type
    if types.is_dictionary(task_type):
        task_type = task_type.value_type
    return any(check(task_type) for check in _FIT)


def _is_name(name: str) -> bool:
    # A name that is damaged is not what a library calls it; half a character cannot be written.
    return bool(name.strip()) and "\N{REPLACEMENT CHARACTER}" not in name and _written(name) == name


def _written(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _spelt(value: Any) -> str | None:
    """A value as the group of its rows is called; None for no value, which an empty text is, too."""
    if isinstance(value, bytes):
        try:
            return value.decode() if value.strip() else None
        except UnicodeDecodeError as error:
            raise Unfit("holds what is not UTF-8 text") from error
    return None if value is None else str(value).lower()
