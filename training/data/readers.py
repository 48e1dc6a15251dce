"""The interface of readers of rows, and the blocks that they yield.

A reader is a function `(wanted, split, pinned, slices) -> Iterator[Block]`; training/recipe/tables/formats.py has all.
It raises UserError if the source as a whole is unreadable (no such column, not a Parquet file). Each row that it cannot
read has a RowProblem. Such a row stays in the block if a part of it was read, with null for the rest: load_data leaves
it out, and a prediction keeps its place. A reader also reads the columns that `slices`, ExtraColumns, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from training.data.row_problems import RowProblem
from training.problems import Problem, UserError, nearest
from training.recipe.source_columns import ROLE_FIELDS
from training.recipe.tables.formats import SOURCES

if TYPE_CHECKING:
    from training.recipe import Data
    from training.recipe.source_columns import SourceColumns

MAX_NAMES_SHOWN = 50

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Block:
    """Some rows of one file, of a split of the Hub, or of an object."""

    where: str
    """The source's name for messages."""
    rows: pa.RecordBatch
    """The wanted columns under the recipe's names, in the types of the source; bytes in case of CSV."""
    numbers: Numbers
    """The number of each row in its source, from 1. In CSV the header is row 1; in JSON lines it is the line."""
    label_names: tuple[str, ...] = ()
    """All labels in order, if the source defines them (ClassLabel)."""
    row_problems: tuple[RowProblem, ...] = ()
    """Rows that cannot be used, whether or not they are in `rows`."""
    share: float = 0.0
    """The share of the file that has been read with this block, 0 to 1."""
    slices: Mapping[str, Any] = field(default_factory=dict)
    """The values of the columns that are read beside the others, as ExtraColumns returns them."""
    split_values: Any = None
    """The Arrow column of data.split; None if the recipe names none."""
    spelt: bool = False
    """Whether lists and objects are JSON texts rather than Arrow values."""
    remarks: tuple[RowProblem, ...] = ()
    """Suspicious rows that are kept."""
    image_folder: str | None = None
    """The folder of a row's images, if each row is a file of it."""
    column_problems: tuple[Problem, ...] = ()
    """Problems of the file's columns as far as it was read. A later row may have a column that is missing so far, so
    only those of the last block that is read count."""

    def filter(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Block:
        """The rows where the mask is true, without problems and remarks."""
        rows = pa.array(mask)
        slices = {name: values.filter(rows) for name, values in self.slices.items()}
        numbers = self.numbers[mask]
        kept = self.rows.filter(rows) if self.rows.num_columns else self.rows
        of_split = None if self.split_values is None else self.split_values.filter(rows)
        return replace(
            self, rows=kept, numbers=numbers, row_problems=(), remarks=(), slices=slices, split_values=of_split
        )

    def parts(self, rows: int) -> Iterator[Block]:
        """Yields the block in parts of this many rows; problems and remarks are in the first."""
        for start in range(0, max(1, len(self.numbers)), rows):
            span = slice(start, start + rows)
            of_split = None if self.split_values is None else self.split_values[span]
            yield replace(
                self,
                rows=self.rows.slice(start, rows),
                numbers=self.numbers[span],
                row_problems=() if start else self.row_problems,
                remarks=() if start else self.remarks,
                slices={name: values[span] for name, values in self.slices.items()},
                split_values=of_split,
            )


class ExtraColumns(Protocol):
    """Columns that a reader reads beside those of `wanted`: for slices of training data, or to travel along with
    predictions."""

    def of_file(self, names: Sequence[str], column_types: Sequence[pa.DataType] = ()) -> dict[str, str]:
        """Returns the source's names of these columns in a file, by their own names. Called once for each file."""

    def of_more_rows(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the same for the columns of all rows of this file that were read so far."""

    def reads(self, name: str) -> bool:
        """Whether the column's values are still read."""

    def of_values(self, name: str, values: list[Any]) -> Any:
        """Returns Python values as a block holds them; None if the column cannot hold them."""

    def of_array(self, column: pa.Array, label_names: Sequence[str]) -> Any:
        """Returns an Arrow column as a block holds it."""

    def of_rows(self, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Returns numbered mappings as they are read."""


Reader = Callable[["SourceColumns", str, Mapping[str, Any], ExtraColumns], Iterator[Block]]
"""Yields the rows of a split in blocks."""


def load_reader(source: str) -> Reader:
    """Returns the reader of a source by its name in SOURCES."""
    module, _, name = SOURCES[source].reader.partition(":")
    reader: Reader = getattr(import_module(module), name)
    return reader


class MissingColumns(UserError):
    """Columns that no row of some files has: other problems of these rows are consequences."""

    def __init__(self, problems: Iterable[Problem], files: Collection[str] = ()) -> None:
        super().__init__(problems)
        self.files = files


def match_columns(wanted: SourceColumns, there: Sequence[str], where: str) -> dict[str, str]:
    """Returns the source's name of each wanted column, by the recipe's name.

    Raises UserError for columns that the recipe names and the source lacks, or has twice.
    """
    if problems := find_column_problems(wanted, there, where):
        raise UserError(problems)
    return wanted.in_file(there).source_names


def find_column_problems(wanted: SourceColumns, there: Sequence[str], where: str) -> list[Problem]:
    """Returns a problem for each column that the recipe names and the source lacks, or has twice."""
    wanted = wanted.in_file(there)
    data = wanted.data
    renamed = [data.rename.get(name, name) for name in there]
    problems = []
    for old in data.rename:
        if old not in there:
            message = f"{where} has no column {old!r}: it has {_list(there)}.{nearest(old, there)}"
            problems.append(Problem(kind="data", where="data.rename", message=message))
    new = {name for old, name in data.rename.items() if old not in there}
    for name in wanted.names:
        field = wanted.field_of(name)
        if renamed.count(name) > 1:
            message = f"{where} has {renamed.count(name)} columns called {name!r}: rename all but one."
            problems.append(Problem(kind="data", where=field, message=message))
        elif name not in renamed and name not in new:
            others = [one for one in renamed if one not in wanted.names]
            message = f"{where} has no column {name!r}: it has {_list(renamed)}.{nearest(name, others)}"
            message += _other_way(wanted, renamed) or _advice(wanted, name)
            problems.append(Problem(kind="data", where=field, message=message))
    unnamed = wanted.unnamed(renamed)
    for name in unnamed:
        message = f"{where} has a column {name!r}, which the recipe does not name: set this to "
        message += f"{name} or, if it is something else, data.rename to {{{name}: another_name}}."
        problems.append(Problem(kind="data", where=f"data.columns.{name}", message=message))
    for name, instead in wanted.task_type.unread_columns.items():
        if name in renamed and name not in wanted.by_source and name not in unnamed:
            message = (
                f"{where} has a column {name!r}, which would have no effect: {instead}; or, if it is something else, "
            )
            message += f"set data.rename to {{{name}: another_name}}."
            problems.append(Problem(kind="data", where="data.columns", message=message))
    problems += _cast_to_nothing(data, renamed, where)
    return problems + wanted.other_problems(there, where)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN:,} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more


def _other_way(wanted: SourceColumns, there: Collection[str]) -> str:
    """Returns the setting for another of the task type's column sets, if the source has all its columns; else ''."""
    has = {*there} - ROLE_FIELDS.keys()
    for one in wanted.task_type.column_sets():
        way = [name for name, column in one.items() if not column.optional]
        if has.issuperset(way):
            # Optional columns are named too: the recipe decides whether they are read.
            named = [way[0], *(name for name, column in one.items() if column.optional and name in has)]
            columns = ", ".join(f"{name}: {name}" for name in named)
            return f" For rows of {' and '.join(way)}, set data.columns: {{{columns}}}."
    return ""


def _advice(wanted: SourceColumns, name: str) -> str:
    column = wanted.task_type.columns.get(wanted.by_source[name].name) if name in wanted.by_source else None
    return f" {column.advice}" if column and column.advice else ""


def _cast_to_nothing(data: Data, there: Sequence[str], where: str) -> list[Problem]:
    return [
        Problem(
            kind="data",
            where=f"data.cast.{name}",
            message=f"{where} has no column {name!r}: it has {_list(there)}.{nearest(name, there)}",
        )
        for name in data.cast
        if name not in there
    ]


def source_error(where: str, message: str) -> UserError:
    """The error of a source that is unreadable as a whole."""
    ended = message if message.endswith((".", "?")) else f"{message}."
    return UserError.of("data", where, ended)
