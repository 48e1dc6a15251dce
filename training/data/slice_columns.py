"""Columns for slices: values that group the rows of validation and test, besides the task type's columns.

Every column of text, whole numbers or truths with few distinct values is kept, whether the recipe names it or not, so a
slice that is named later needs no new reading of rows. Every other column is left out, with the reason.

Memory: the distinct values of each column. The rows' values are on disk, as indices of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from training.data.arrow_files import BLOCK_ROWS, in_blocks, ipc_writer
from training.data.blocks import Block, Numbers
from training.data.plain_types import plain

if TYPE_CHECKING:
    from training.recipe.source_columns import SourceColumns

MAX_VALUES = 1000
MAX_BYTES = 256  # of a value
MAX_COLUMNS = 100  # of the types that can be kept

Places = np.ndarray[Any, np.dtype[np.int32]]
"""The index of each row's value among the distinct ones; -1 for a missing value."""

_FIT = (types.is_string, types.is_large_string, types.is_string_view, types.is_integer, types.is_boolean, types.is_null)
_SORTS = {"truth": types.is_boolean, "number": types.is_integer}
MIXED = "does not hold values of one type"


class Unfit(Exception):
    """The reason to leave a column out, worded to follow its name."""


class SliceColumns:
    """The columns for slices of one load.

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
        """Begins to read the split `source`, whose rows go into the evaluated splits `splits`, if any."""
        self._source, self._splits, self._of_files = source, tuple(splits), None
        self._found |= {split: {} for split in self._splits}

    @property
    def reading(self) -> bool:
        """Whether the split that is being read needs any column."""
        return bool(self._splits)

    def of_file(self, there: Sequence[str], types_there: Sequence[pa.DataType] = ()) -> dict[str, str]:
        """Returns the columns of a file to read for slices, by the recipe's names.

        To be called once for each file; `there` is all its columns, `types_there` their types if the format has any.
        """
        renamed = [self._wanted.data.rename.get(name, name) for name in there]
        own = self._wanted.by_source
        found = {ours: theirs for ours, theirs in zip(renamed, there, strict=True) if ours not in own}
        self._seen |= dict.fromkeys(found)
        for ours, kind in zip(renamed, types_there, strict=False):
            try:
                need_type(kind)
            except Unfit as error:
                self.leave_out(ours, str(error))
        times = Counter(renamed)
        for ours in found:
            if times[ours] > 1:
                self.leave_out(ours, "is there more than once")
            elif not _is_name(ours):
                self.leave_out(ours, "has no name that is text")
        for ours in found.keys() ^ (found if self._of_files is None else self._of_files).keys():
            self.leave_out(ours, f"is in some files of {self._source} only")
        for ours in list(filter(self.reads, found))[MAX_COLUMNS:]:
            self.leave_out(ours, f"comes after {MAX_COLUMNS} other columns")
        self._of_files = found
        return {ours: theirs for ours, theirs in found.items() if self.reads(ours)} if self.reading else {}

    def reads(self, name: str) -> bool:
        """Whether the column's values are still wanted."""
        return name not in self._left_out

    def leave_out(self, name: str, why: str) -> None:
        """Leaves a column out of all splits."""
        if self.reading and self.reads(name) and name not in self._wanted.by_source:
            self._seen[name] = None
            self._left_out[name] = why
            for columns in self._found.values():
                if column := columns.pop(name, None):
                    column.file.unlink(missing_ok=True)

    def add(self, split: str, block: Block) -> None:
        """Keeps the values of a split's rows in the columns that are read."""
        if not block.rows.num_rows or split not in self._splits:
            return
        for name in filter(self.reads, self._of_files or ()):
            column = self._found[split].get(name) or _Column(self._folder / f"slice-{next(self._files)}")
            try:
                places = column.places_of(block.slices[name])
            except Unfit as error:
                self.leave_out(name, str(error))
                continue
            self._found[split][name] = column
            with column.file.open("ab") as file:
                file.write(places.tobytes())

    def write(self, split: str, final: Path, removed: Numbers) -> None:
        """Writes the kept columns of a split to the file `final`, if there are any, without the rows `removed`: their
        sorted positions among all added rows."""
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
        """Returns the names of the columns `kept`, and of those `left_out` with the reason."""
        why = dict(self._left_out)
        for name in self._seen:
            found = [columns[name] for columns in self._found.values() if name in columns]
            if name not in why and not any(column.places for column in found):
                why[name] = "holds no value" if found else "is in train only"
        left_out = {_printable(name): why[name] for name in self._seen if name in why}
        return {"kept": [name for name in self._seen if name not in why], "left_out": left_out}


@dataclass
class _Column:
    """The values of one column in one split."""

    file: Path
    """The file of Places."""
    places: dict[str, int] = field(default_factory=dict)
    sort: str = ""

    def places_of(self, values: pa.Array) -> Places:
        """Returns the indices of values, and adds new ones. Raises Unfit for unsuitable values."""
        coded = plain(values).dictionary_encode()
        kind = coded.type.value_type
        is_text = types.is_binary(kind) or types.is_large_binary(kind)
        if is_text and (pc.max(pc.binary_length(coded.dictionary)).as_py() or 0) > MAX_BYTES:
            raise Unfit(f"has values of more than {MAX_BYTES} bytes")
        if not types.is_null(kind):
            sort = next((sort for sort, check in _SORTS.items() if check(kind)), "text")
            self.sort = self.sort or sort
            if sort != self.sort:
                raise Unfit(MIXED)
        spelt = map(_group_name, coded.dictionary.to_pylist())
        places = [-1 if text is None else self.places.setdefault(text, len(self.places)) for text in spelt]
        if len(self.places) > MAX_VALUES:
            raise Unfit(f"has more than {MAX_VALUES:,} different values")
        return np.array([*places, -1], np.int32)[coded.indices.fill_null(-1).to_numpy()]

    def values(self, removed: Numbers) -> pa.Array:
        """Returns the distinct values of the remaining rows, sorted."""
        there = {place for places in self._without(removed) for place in np.unique(places).tolist()}
        return pa.array(sorted(text for text, place in self.places.items() if place in there), pa.string())

    def read(self, removed: Numbers, values: pa.Array) -> Iterator[pa.Array]:
        """Yields the index of each remaining row's value in `values`, null for a missing value."""
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


def need_type(kind: pa.DataType) -> None:
    """Raises Unfit if values of an Arrow type cannot group rows."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if not any(check(kind.value_type if types.is_dictionary(kind) else kind) for check in _FIT):
        raise Unfit(f"is of type {str(kind).partition('<')[0]}")


def _is_name(name: str) -> bool:
    # Libraries replace damaged characters of a name; half a character cannot be written.
    return bool(name.strip()) and "\N{REPLACEMENT CHARACTER}" not in name and _printable(name) == name


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _group_name(value: Any) -> str | None:
    """Returns the name of a value's group; None for a missing value or an empty text."""
    if isinstance(value, bytes):
        try:
            return value.decode() if value.strip() else None
        except UnicodeDecodeError as error:
            raise Unfit("holds what is not UTF-8 text") from error
    return None if value is None else str(value).lower()
