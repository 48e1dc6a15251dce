"""Rows of a Python function or object that the recipe names."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import count
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from training.data.file_systems import display_name
from training.data.hub_datasets import from_dataset, from_table
from training.data.readers import Block, source_error
from training.data.row_dicts import from_columns, from_mappings
from training.data.sources import is_rows, is_splits, load_object, object_splits
from training.problems import UserError

if TYPE_CHECKING:
    from training.data.readers import ExtraColumns
    from training.recipe.source_columns import SourceColumns

_END = object()


def read_object(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns) -> Iterator[Block]:
    """The rows of the object `data.path` for a split; a function is called once for each split."""
    data = wanted.data
    found: Any = load_object(data.path)
    name = object_splits(data, wanted.evaluated).get(split, split)
    if is_splits(found, data):
        where, rows = f"{data.path}[{name!r}]", found.get(name)
        if rows is None:
            raise source_error(
                f"data.splits.{split}", f"{data.path} has no {name!r}: it has {', '.join(map(str, found))}"
            )
    elif is_rows(found) or isinstance(found, Mapping):
        where, rows = data.path, found
    else:
        where = f"{data.path}({name!r})"
        with _user_code(where):
            rows = found(name)
    yield from _blocks(rows, wanted, where, slices)


def _blocks(rows: Any, wanted: SourceColumns, where: str, slices: ExtraColumns) -> Iterator[Block]:
    library = type(rows).__module__.partition(".")[0]
    if library == "pandas" and hasattr(rows, "columns"):
        with _user_code(where):
            rows = pa.Table.from_pandas(rows, preserve_index=False)
    if isinstance(rows, pa.Table):
        yield from from_table(rows, wanted, where, slices)
    elif library == "datasets" and hasattr(rows, "num_rows"):
        yield from from_dataset(rows, wanted, where, slices)
    elif isinstance(rows, Mapping):
        yield from from_columns(rows, wanted, where, slices)
    elif isinstance(rows, Iterable) or is_rows(rows):
        with _user_code(where):
            total = len(rows) if isinstance(rows, Sized) else None
        yield from from_mappings(_numbered(rows, where, total), wanted, where, slices, total)
    else:
        raise source_error(where, f"gave {type(rows).__name__}: it must give an iterable of mappings")


def _numbered(rows: Any, where: str, total: int | None) -> Iterator[tuple[int, Any]]:
    """Yields the numbered rows of an iterable, or of an object with only a length and an index."""
    with _user_code(where):
        given = iter(rows) if isinstance(rows, Iterable) else (rows[place] for place in range(total or 0))
    for number in count(1):
        with _user_code(f"{where} row {number}"):
            row = next(given, _END)
            row = dict(row) if isinstance(row, Mapping) else row  # so that no code of the user runs later
        if row is _END:
            return
        yield number, row


@contextlib.contextmanager
def _user_code(where: str) -> Iterator[None]:
    """Turns errors of the user's code into UserError with the failing line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{display_name(last.filename)} line {last.lineno}"
        raise source_error(where, f"failed in {at}: {type(error).__name__}: {error}") from error
