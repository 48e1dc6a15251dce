"""Rows of whole documents to rows of at most so many tokens: packed together, or cut into windows. Nothing is lost.

For max_length 4, the documents [1 2 3 4 5 6], [7] and [8 9 10]

packed      [1 2 3 4]  starts [0]         windows     [1 2 3 4]  row 0
            [5 6 7 8]  starts [0 2 3]                 [5 6]      row 0
            [9 10]     starts [0]                     [7]        row 1
                                                      [8 9 10]   row 2

Of a document that is cut, each part is one to itself: no state is carried from one to the next. Where none may be cut,
as conversations, [1 2], [3 4 5] and [6] are

packed_whole    [3 4 5 6]  starts [0 3]
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

from training.tokenization.features import of_lengths

STARTS = "starts"
"""The column of packed rows: the places within a row at which a document, or the rest of one, begins."""
OF_ANSWER = "of_answer"
"""The column that says of each token whether the model shall say it (1) or is shown it (0); where it is not for all."""

Places = npt.NDArray[np.int64]


def packed(documents: Iterable[pa.RecordBatch], max_length: int) -> Iterator[pa.RecordBatch]:
    """One document after the other, cut into rows of exactly `max_length` tokens, the last one shorter.

    Of token features as `training.tokenization.features.Features` has them, those that are lists, each with a value a
    token; gives the same, with `length`, and STARTS (list<int32>). At least one batch.
    """
    left: dict[str, npt.NDArray[Any]] = {}
    starts, tokens, given = np.empty(0, np.int64), 0, False
    for batch in documents:
        new = {field.name: flat(batch.column(field.name)) for field in batch.schema if pa.types.is_list(field.type)}
        lengths = batch.column("length").to_numpy().astype(np.int64)
        starts = np.concatenate([starts, tokens + np.cumsum(lengths) - lengths])
        left = {name: np.concatenate([left[name], values]) if left else values for name, values in new.items()}
        tokens += int(lengths.sum())
        if whole := tokens // max_length * max_length:
            yield _rows({name: values[:whole] for name, values in left.items()}, starts, whole, max_length)
            left = {name: values[whole:].copy() for name, values in left.items()}
            starts, tokens, given = starts[starts >= whole] - whole, tokens - whole, True
    if tokens or not given:
        yield _rows(left, starts, tokens, max_length)


def packed_whole(documents: pa.RecordBatch, max_length: int) -> pa.RecordBatch:
    """Documents of at most `max_length` tokens in rows of as many, none of them cut: the longest first, each into the
    fullest row that has room for it.

    Of token features as `packed` takes them; gives the same, with STARTS, and of numbers, such as `length`, their sums.
    """
    lengths = documents.column("length").to_numpy().astype(np.int64)
    rows = _best_fit(lengths, max_length)
    order = np.concatenate(rows)
    first = np.cumsum([0, *map(len, rows[:-1])])  # the place of each row's first document in that order
    before = np.cumsum(lengths[order]) - lengths[order]  # the tokens that stand before each document
    ordered, columns = documents.take(pa.array(order)), {}
    for field in documents.schema:
        values = ordered.column(field.name)
        if types.is_list(field.type):
            columns[field.name] = of_lengths(flat(values), np.add.reduceat(lengths[order], first))
        else:
            columns[field.name] = np.add.reduceat(values.to_numpy(), first, dtype=field.type.to_pandas_dtype())
    of_row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    columns[STARTS] = of_lengths((before - before[first][of_row]).astype(np.int32), np.bincount(of_row))
    return pa.RecordBatch.from_pydict(columns)


def _best_fit(lengths: Places, max_length: int) -> list[list[int]]:
    """The documents of each row."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # the room that is left in each, and its number
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


def windows(documents: Iterable[pa.RecordBatch], max_length: int) -> Iterator[pa.RecordBatch]:
    """Each document as windows of `max_length` tokens, the last one shorter; one window where it has no tokens.

    Of token features as `packed` takes them; gives the same, with `length`, and `row` (int64), the document's number.
    """
    documents_before = 0
    for batch in documents:
        lengths = batch.column("length").to_numpy().astype(np.int64)  # (N,)
        cut = np.maximum(1, -(-lengths // max_length))  # (N,) windows of each
        document = np.repeat(np.arange(len(lengths)), cut)
        window = np.arange(len(document)) - np.repeat(np.cumsum(cut) - cut, cut)  # its number within the document
        sizes = np.minimum(max_length, lengths[document] - window * max_length)
        columns: dict[str, Any] = {
            field.name: of_lengths(flat(batch.column(field.name)), sizes)
            for field in batch.schema
            if pa.types.is_list(field.type)
        }
        columns |= {"length": sizes.astype(np.int32), "row": documents_before + document}
        yield pa.RecordBatch.from_pydict(columns)
        documents_before += len(lengths)


def flat(column: pa.ListArray) -> npt.NDArray[Any]:
    """(T,) the values of all rows of a list column."""
    return np.asarray(column.flatten().to_numpy())


def _rows(values: dict[str, npt.NDArray[Any]], starts: Places, tokens: int, max_length: int) -> pa.RecordBatch:
    """The first `tokens` tokens in rows, given where documents start among all of them."""
    edges = np.arange(0, tokens, max_length)
    of_row, place = np.divmod(np.union1d(edges, starts[starts < tokens]), max_length)
    lengths = np.minimum(max_length, tokens - edges)
    columns: dict[str, Any] = {name: of_lengths(some, lengths) for name, some in values.items()}
    columns["length"] = lengths.astype(np.int32)
    columns[STARTS] = of_lengths(place.astype(np.int32), np.bincount(of_row, minlength=len(edges)))
    return pa.RecordBatch.from_pydict(columns)
