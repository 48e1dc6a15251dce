"""Rows of at most `max_length` tokens from documents of any length: packed together, or cut into windows.

For max_length 4, the documents [1 2 3 4 5 6], [7] and [8 9 10]

pack_documents  [1 2 3 4]  starts [0]         split_documents  [1 2 3 4]  row 0
                [5 6 7 8]  starts [0 2 3]                      [5 6]      row 0
                [9 10]     starts [0]                          [7]        row 1
                                                               [8 9 10]   row 2

The parts of a document are independent: no state is carried from one to the next. Documents that must not be cut, such
as the conversations [1 2], [3 4 5] and [6]

pack_whole_documents    [3 4 5 6]  starts [0 3]
                        [1 2]      starts [0]

N documents, T tokens of all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from training.tokenization.features import list_column

STARTS = "starts"
"""The column of packed rows: the positions at which a document, or the rest of one, begins."""
OF_ANSWER = "of_answer"
"""The column with 1 for each token that is a target, and 0 for context; absent if all tokens are targets."""

Places = npt.NDArray[np.int64]


def pack_documents(documents: Iterable[pa.RecordBatch], max_length: int) -> Iterator[pa.RecordBatch]:
    """The documents one after another, cut into rows of exactly `max_length` tokens; the last row may be shorter.

    Takes the list columns of token features; returns the same columns, `length` and STARTS (list<int32>). At least one
    batch.
    """
    rest: dict[str, npt.NDArray[Any]] = {}
    starts, tokens, is_empty = np.empty(0, np.int64), 0, True
    for batch in documents:
        new = {field.name: flatten(batch.column(field.name)) for field in batch.schema if pa.types.is_list(field.type)}
        lengths = batch.column("length").to_numpy().astype(np.int64)
        starts = np.concatenate([starts, tokens + np.cumsum(lengths) - lengths])
        rest = {name: np.concatenate([rest[name], values]) if rest else values for name, values in new.items()}
        tokens += int(lengths.sum())
        if whole := tokens // max_length * max_length:
            yield _rows({name: values[:whole] for name, values in rest.items()}, starts, whole, max_length)
            rest = {name: values[whole:].copy() for name, values in rest.items()}
            starts, tokens, is_empty = starts[starts >= whole] - whole, tokens - whole, False
    if tokens or is_empty:
        yield _rows(rest, starts, tokens, max_length)


def pack_whole_documents(documents: pa.RecordBatch, max_length: int) -> pa.RecordBatch:
    """Documents of at most `max_length` tokens in rows of at most as many, without cuts: the longest first, each into
    the fullest row with room for it (best fit).

    Takes token features; returns the same list columns, STARTS, and the sums of number columns such as `length`.
    """
    lengths = documents.column("length").to_numpy().astype(np.int64)
    rows = _best_fit(lengths, max_length)
    order = np.concatenate(rows)
    first = np.cumsum([0, *map(len, rows[:-1])])  # each row's first document, as an index of `order`
    before = np.cumsum(lengths[order]) - lengths[order]  # the tokens before each document
    ordered, columns = documents.take(pa.array(order)), {}
    for field in documents.schema:
        values = ordered.column(field.name)
        if types.is_list(field.type):
            columns[field.name] = list_column(flatten(values), np.add.reduceat(lengths[order], first))
        else:
            columns[field.name] = np.add.reduceat(values.to_numpy(), first, dtype=field.type.to_pandas_dtype())
    of_row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    columns[STARTS] = list_column((before - before[first][of_row]).astype(np.int32), np.bincount(of_row))
    return pa.RecordBatch.from_pydict(columns)


def _best_fit(lengths: Places, max_length: int) -> list[list[int]]:
    """The documents of each row, by number."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, number of the row), sorted
    for document in np.argsort(-lengths, kind="stable").tolist():
        place = bisect_left(open_rows, (int(lengths[document]), 0))
        if place < len(open_rows):
            room, row = open_rows.pop(place)
        else:
            room, row = max_length, len(rows)
            rows.append([])
        rows[row].append(document)
        insort(open_rows, (room - int(lengths[document]), row))
    return rows


def split_documents(documents: Iterable[pa.RecordBatch], max_length: int) -> Iterator[pa.RecordBatch]:
    """Each document as windows of `max_length` tokens, the last one shorter; one window for an empty document.

    Takes the list columns of token features; returns the same, `length`, and `row` (int64), the document's number.
    """
    documents_before = 0
    for batch in documents:
        lengths = batch.column("length").to_numpy().astype(np.int64)  # (N,)
        cut = np.maximum(1, -(-lengths // max_length))  # (N,) windows of each document
        document = np.repeat(np.arange(len(lengths)), cut)
        window = np.arange(len(document)) - np.repeat(np.cumsum(cut) - cut, cut)  # the number within its document
        sizes = np.minimum(max_length, lengths[document] - window * max_length)
        columns: dict[str, Any] = {
            field.name: list_column(flatten(batch.column(field.name)), sizes)
            for field in batch.schema
            if pa.types.is_list(field.type)
        }
        columns |= {"length": sizes.astype(np.int32), "row": documents_before + document}
        yield pa.RecordBatch.from_pydict(columns)
        documents_before += len(lengths)


def flatten(column: pa.ListArray) -> npt.NDArray[Any]:
    """(T,) the values of a list column."""
    return np.asarray(column.flatten().to_numpy())


def _rows(values: dict[str, npt.NDArray[Any]], starts: Places, tokens: int, max_length: int) -> pa.RecordBatch:
    """The first `tokens` tokens as rows; `starts` are the documents' positions among all tokens."""
    edges = np.arange(0, tokens, max_length)
    of_row, place = np.divmod(np.union1d(edges, starts[starts < tokens]), max_length)
    lengths = np.minimum(max_length, tokens - edges)
    columns: dict[str, Any] = {name: list_column(some, lengths) for name, some in values.items()}
    columns["length"] = lengths.astype(np.int32)
    columns[STARTS] = list_column(place.astype(np.int32), np.bincount(of_row, minlength=len(edges)))
    return pa.RecordBatch.from_pydict(columns)
