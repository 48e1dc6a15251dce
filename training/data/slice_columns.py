"""Columns for slices: values that group the rows of validation and test, besides the task type's columns.

Every column of text, whole numbers or truths with few distinct values is kept, whether the recipe names it or not, so a
slice that is named later does not need the rows read again. Every other column is left out, with the reason.

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

from training.data.arrow_columns import plain, with_label_names
from training.data.ipc_files import BLOCK_ROWS, in_blocks, ipc_writer
from training.data.readers import Block, Numbers
from training.recipe.data_fields import DATASET

if TYPE_CHECKING:
    from training.recipe.source_columns import SourceColumns

MAX_VALUES = 1000
MAX_BYTES = 256  # of a value
MAX_COLUMNS = 100  # of the types that can be kept

Places = np.ndarray[Any, np.dtype[np.int32]]
"""The index of each row's value among the distinct ones; -1 for a missing value."""

_GROUPING_TYPES = (
    types.is_string,
    types.is_large_string,
    types.is_string_view,
    types.is_integer,
    types.is_boolean,
    types.is_null,
)
_VALUE_TYPES = {"truth": types.is_boolean, "number": types.is_integer}
MIXED = "does not hold values of one type"


class UnsuitableColumn(Exception):
    """A column that cannot group rows. The message follows the column's name."""


class SliceColumns:
    """The columns for slices of one load.

    A column that is left out of one split is left out of all.
    """

    def __init__(self, wanted: SourceColumns, folder: Path) -> None:
        self._wanted, self._folder = wanted, folder
        self._source, self._dataset = "", ""
        self._splits: tuple[str, ...] = ()
        self._file_columns: dict[str, str] | None = None
        self._earlier: dict[str, str] | None = None
        """The columns of the split's files before this one."""
        self._seen: dict[str, None] = {}
        self._reasons: dict[str, str] = {}
        self._columns: dict[str, dict[str, _Column]] = {}
        self._rows: Counter[str] = Counter()
        self._files = count()

    def begin(self, source: str, splits: Iterable[str], wanted: SourceColumns | None = None, dataset: str = "") -> None:
        """Prepares for the split `source`, whose rows go into the evaluated splits `splits`, if any.

        `wanted` are the columns of its set, and `dataset` is the set's name in a mixture: its rows get this value in
        the column DATASET. A column that only some sets have is missing in the rows of the others.
        """
        self._end_file()
        self._source, self._splits, self._file_columns, self._earlier = source, tuple(splits), None, None
        self._wanted, self._dataset = wanted or self._wanted, dataset
        for split in self._splits:
            self._columns.setdefault(split, {})
        if dataset and self._splits:
            self._seen[DATASET] = None

    @property
    def reading(self) -> bool:
        """Whether the split that is being read needs any column."""
        return bool(self._splits)

    def of_file(self, names: Sequence[str], column_types: Sequence[pa.DataType] = ()) -> dict[str, str]:
        """Returns the columns of a file to read for slices, by the recipe's names.

        Called once for each file, with all its columns and, if the format has types, their types; `of_more_rows` adds
        columns of a format whose rows may have columns of their own.
        """
        self._end_file()
        return self.of_more_rows(names, column_types)

    def of_more_rows(self, names: Sequence[str], column_types: Sequence[pa.DataType] = ()) -> dict[str, str]:
        """Returns the same for the columns of all rows of this file that were read so far. Rows before have no value in
        new columns."""
        renamed = [self._wanted.data.rename.get(name, name) for name in names]
        stored = self._wanted.by_source
        others = {name: source for name, source in zip(renamed, names, strict=True) if name not in stored}
        if self._dataset:
            others.pop(DATASET, None)
        self._seen |= dict.fromkeys(others)
        for name, column_type in zip(renamed, column_types, strict=False):
            try:
                require_grouping_type(column_type)
            except UnsuitableColumn as error:
                self.leave_out(name, str(error))
        counts = Counter(renamed)
        for name in others:
            if counts[name] > 1:
                self.leave_out(name, "occurs more than once")
            elif not _is_name(name):
                self.leave_out(name, "has no name that is text")
        for name in list(filter(self.reads, others))[MAX_COLUMNS:]:
            self.leave_out(name, f"comes after {MAX_COLUMNS} other columns")
        self._file_columns = others
        return {name: source for name, source in others.items() if self.reads(name)} if self.reading else {}

    def _end_file(self) -> None:
        """Leaves out the columns that only some of the split's files have."""
        if self._file_columns is not None:
            earlier = self._file_columns if self._earlier is None else self._earlier
            for name in self._file_columns.keys() ^ earlier.keys():
                self.leave_out(name, f"is in some files of {self._source} only")
            self._earlier = self._file_columns

    def reads(self, name: str) -> bool:
        """Whether the column's values are read: no reason against it is known yet."""
        return name not in self._reasons

    def of_values(self, name: str, values: list[Any]) -> pa.Array | None:
        """Returns Python values as an array. Leaves out a column of other types."""
        try:
            # A prefix is enough to see that a text is too long.
            array = pa.array([value[: MAX_BYTES + 1] if isinstance(value, str) else value for value in values])
            require_grouping_type(array.type)
        except UnsuitableColumn as error:
            self.leave_out(name, str(error))
        except UnicodeEncodeError:
            self.leave_out(name, "holds text that is not UTF-8")
        except (OverflowError, TypeError, pa.ArrowException):
            self.leave_out(name, MIXED)
        else:
            return array
        return None

    def of_array(self, column: pa.Array, label_names: Sequence[str]) -> pa.Array:
        """Returns an Arrow column, with the names of labels in place of their indices."""
        return with_label_names(plain(column), label_names)

    def of_rows(self, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Returns the rows as they are."""
        return iter(rows)

    def leave_out(self, name: str, reason: str) -> None:
        """Leaves a column out of all splits."""
        if self._dataset and name == DATASET:
            return
        if self.reading and self.reads(name) and name not in self._wanted.by_source:
            self._seen[name] = None
            self._reasons[name] = reason
            for columns in self._columns.values():
                if column := columns.pop(name, None):
                    column.file.unlink(missing_ok=True)

    def add(self, split: str, block: Block) -> None:
        """Stores the values of a split's rows in the columns that are read."""
        if not block.rows.num_rows or split not in self._splits:
            return
        rows, columns = block.rows.num_rows, self._columns[split]
        given = {name: values for name, values in block.slices.items() if self.reads(name)}
        if self._dataset:
            given[DATASET] = pa.array([self._dataset] * rows, pa.string())
        given |= {name: pa.nulls(rows) for name in columns if name not in given}
        for name, values in given.items():
            column = columns.get(name)
            if column is None:
                column = _Column(self._folder / f"slice-{next(self._files)}")
                column.append(np.full(self._rows[split], -1, np.int32))  # rows before, without this column
            try:
                places = column.encode(values)
            except UnsuitableColumn as error:
                self.leave_out(name, str(error))
                continue
            columns[name] = column
            column.append(places)
        self._rows[split] += rows

    def write(self, split: str, final: Path, removed: Numbers) -> None:
        """Writes the kept columns of a split to the file `final`, if there are any, without the rows `removed`: their
        sorted positions among all added rows."""
        kept = self.summary()["kept"]
        columns = {name: column for name, column in self._columns.get(split, {}).items() if name in kept}
        if not columns:
            return
        values = [column.values(removed) for column in columns.values()]
        batches = zip(
            *(column.read(removed, distinct) for column, distinct in zip(columns.values(), values, strict=True)),
            strict=True,
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
        self._end_file()
        reasons = dict(self._reasons)
        for name in self._seen:
            parts = [columns[name] for columns in self._columns.values() if name in columns]
            if name not in reasons and not any(column.places for column in parts):
                reasons[name] = "holds no value" if parts else "is in train only"
        left_out = {_printable(name): reasons[name] for name in self._seen if name in reasons}
        return {"kept": [name for name in self._seen if name not in reasons], "left_out": left_out}


@dataclass
class _Column:
    """The values of one column in one split."""

    file: Path
    """The file of Places."""
    places: dict[str, int] = field(default_factory=dict)
    value_type: str = ""

    def encode(self, values: pa.Array) -> Places:
        """Returns the indices of values, and adds new ones. Raises UnsuitableColumn for other values."""
        coded = plain(values).dictionary_encode()
        stored_type = coded.type.value_type
        is_text = types.is_binary(stored_type) or types.is_large_binary(stored_type)
        if is_text and (pc.max(pc.binary_length(coded.dictionary)).as_py() or 0) > MAX_BYTES:
            raise UnsuitableColumn(f"has values of more than {MAX_BYTES} bytes")
        if not types.is_null(stored_type):
            value_type = next((value_type for value_type, check in _VALUE_TYPES.items() if check(stored_type)), "text")
            self.value_type = self.value_type or value_type
            if value_type != self.value_type:
                raise UnsuitableColumn(MIXED)
        texts = map(_group_name, coded.dictionary.to_pylist())
        places = [-1 if text is None else self.places.setdefault(text, len(self.places)) for text in texts]
        if len(self.places) > MAX_VALUES:
            raise UnsuitableColumn(f"has more than {MAX_VALUES:,} different values")
        return np.array([*places, -1], np.int32)[coded.indices.fill_null(-1).to_numpy()]

    def append(self, places: Places) -> None:
        """Adds rows to the file."""
        with self.file.open("ab") as file:
            file.write(places.tobytes())

    def values(self, removed: Numbers) -> pa.Array:
        """Returns the distinct values of the remaining rows, sorted."""
        used = {place for places in self._read_places(removed) for place in np.unique(places).tolist()}
        return pa.array(sorted(text for text, place in self.places.items() if place in used), pa.string())

    def read(self, removed: Numbers, values: pa.Array) -> Iterator[pa.Array]:
        """Yields the index of each remaining row's value in `values`, null for a missing value."""
        final = np.zeros(len(self.places) + 1, np.int32)
        final[[self.places[text] for text in values.to_pylist()]] = np.arange(len(values))
        for places in self._read_places(removed):
            yield pa.array(final[places], mask=places < 0)

    def _read_places(self, removed: Numbers) -> Iterator[Places]:
        with self.file.open("rb") as file:
            for start in count(0, BLOCK_ROWS):
                places = np.frombuffer(file.read(4 * BLOCK_ROWS), np.int32)
                if not len(places):
                    return
                first, last = np.searchsorted(removed, [start, start + BLOCK_ROWS])
                yield np.delete(places, removed[first:last] - start)


def require_grouping_type(column_type: pa.DataType) -> None:
    """Raises UnsuitableColumn if values of an Arrow type cannot group rows."""
    if isinstance(column_type, pa.BaseExtensionType):
        column_type = column_type.storage_type
    if not any(
        check(column_type.value_type if types.is_dictionary(column_type) else column_type) for check in _GROUPING_TYPES
    ):
        raise UnsuitableColumn(f"is of type {str(column_type).partition('<')[0]}")


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
            raise UnsuitableColumn("holds text that is not UTF-8") from error
    return None if value is None else str(value).lower()
