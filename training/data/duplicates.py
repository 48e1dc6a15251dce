"""Search for equal texts by a hash of 8 bytes a row; training/data/checks.py reports them. Memory: 20 bytes a row, and
some 80 during the comparison; of ratings and preferences 12 more.

Two different texts among N have the same hash with a chance of N² / 2⁶⁵: one in 37 million for a million rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from training.data.arrow_columns import as_json
from training.data.ipc_files import read_batches
from training.data.label_indices import whole_number
from training.data.readers import Block, Numbers
from training.data.row_problems import shorten
from training.jobs.protocol import Result
from training.recipe.column_types import Form, module_of
from training.recipe.source_columns import SourceColumns, StoredColumn

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
_BITS = np.uint64(2**53 - 1)
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
"""Factors that join hashes in an order."""


def hash_rows(rows: pa.RecordBatch, inputs: Sequence[StoredColumn]) -> Hashes:
    """Returns a hash of each row's values in these columns, the same on every machine."""
    *earlier, texts = (_spell(rows.column(column.name), column.form) for column in inputs)
    if earlier:
        texts = [
            "".join(f"{len(text)} {text} " for text in leading) + final
            for *leading, final in zip(*earlier, texts, strict=True)
        ]
    return hash_texts(texts)


def hash_texts(texts: Iterable[str]) -> Hashes:
    """Returns a hash of each text, the same on every machine."""
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def hash_ids(texts: Iterable[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns 53 bits of these hashes, which float64 and int64 hold exactly."""
    return (hash_texts(texts) & _BITS).astype(np.int64)


def _spell(column: pa.Array, form: Form | None = None) -> list[str]:
    if form == "image":
        examine = module_of(form).examine
        return [examine(image).pixels for image in column.to_pylist()]
    return [value if isinstance(value, str) else as_json(value) for value in column.to_pylist()]


@dataclass(frozen=True)
class NamedRow:
    """A row and its label, as messages name them."""

    where: str
    row: int
    label: str
    """As messages spell it."""

    def __str__(self) -> str:
        return f"{self.where} row {self.row}"

    def relative_to(self, other: NamedRow, verb: str = "repeats row") -> str:
        """Returns a reference to this row in a message about another one."""
        return f"{verb} {self.row}" + (f" of {self.where}" if self.where != other.where else "")


@dataclass(frozen=True)
class Equal:
    """The number of equal texts, and the first example."""

    count: int
    first: tuple[NamedRow, NamedRow]
    """The later row, and the earlier one with the same text."""
    text: str


@dataclass
class _Rows:
    hashes: list[Hashes] = field(default_factory=list)
    labels: list[np.ndarray[Any, np.dtype[np.int32]]] = field(default_factory=list)
    judged: list[Hashes] = field(default_factory=list)
    """For ratings and preferences: a hash of the prompt with the answer, or with both answers in any order. For other
    rows that may repeat their inputs: a hash of all columns."""
    numbers: list[Numbers] = field(default_factory=list)
    files: list[tuple[int, str]] = field(default_factory=list)
    """Each file's first row, counted from 0 in the split, and the file's name."""
    count: int = 0


class HashedRows:
    """A hash of each row of all splits. Examples in messages come from `folder`, with the column `shown`, and that of
    labels if there is one, of the rows of each split as Arrow."""

    def __init__(self, folder: Path, shown: StoredColumn, labels: StoredColumn | None = None) -> None:
        self._folder, self._shown, self._labels = folder, shown, labels
        self._splits: dict[str, _Rows] = {}
        self._sorted: dict[str, tuple[Hashes, Numbers]] = {}

    def add(self, split: str, block: Block, hashes: Hashes) -> None:
        """Adds the rows of a block."""
        rows = self._splits.setdefault(split, _Rows())
        rows.hashes.append(hashes)
        rows.numbers.append(block.numbers)
        if not rows.files or rows.files[-1][1] != block.where:
            rows.files.append((rows.count, block.where))
        rows.count += len(hashes)

    def before(self, split: str) -> list[str]:
        """Returns the splits that come before this one."""
        return list(self._splits)[: list(self._splits).index(split)] if split in self._splits else []

    def shared(self, earlier: str, later: str) -> Equal | None:
        """Returns the rows of the later split whose hash is in the earlier one."""
        earlier_hashes, earlier_order = self._sort_hashes(earlier)
        hashes, order = self._sort_hashes(later)
        if not len(earlier_hashes) or not len(hashes):
            return None
        nearest = np.minimum(np.searchsorted(earlier_hashes, hashes), len(earlier_hashes) - 1)
        shared = np.flatnonzero(earlier_hashes[nearest] == hashes)
        if not len(shared):
            return None
        first = shared[np.argmin(order[shared])]
        return self._example(len(shared), later, order[first], earlier, earlier_order[nearest[first]])

    def _sort_hashes(self, split: str) -> tuple[Hashes, Numbers]:
        """Returns the split's hashes sorted, and their positions; equal ones in the order of their rows."""
        if split not in self._sorted:
            blocks = self._splits.get(split, _Rows()).hashes
            hashes = np.concatenate(blocks) if blocks else np.zeros(0, np.uint64)
            order = np.argsort(hashes, kind="stable")
            self._sorted[split] = hashes[order], order
        return self._sorted[split]

    def place(self, split: str, position: int) -> NamedRow:
        """Returns the row at a position of a split, counted from 0."""
        rows = self._splits[split]
        where = next(name for start, name in reversed(rows.files) if start <= position)
        label = self._value_at(split, position, self._labels) if self._labels else ""
        return NamedRow(where, int(_item_at(rows.numbers, position)), label)

    def _example(self, count: int, split: str, position: int, other: str, other_position: int) -> Equal:
        places = self.place(split, int(position)), self.place(other, int(other_position))
        return Equal(count, places, self._value_at(split, int(position), self._shown))

    def _value_at(self, split: str, position: int, column: StoredColumn) -> str:
        for batch in read_batches(self._folder / split):
            if position < batch.num_rows:
                value = batch.column(column.name)[position].as_py()
                if column.form == "image":
                    return "the same pixels"
                return repr(value) if column.form == "label" else shorten(value)
            position -= batch.num_rows
        raise IndexError(position)


class RepeatedRows(Result):
    """The rows of a stored file whose inputs are those of rows of another one."""

    rows: int
    """All rows of the file."""
    repeated: int
    first: str | None
    """The first column of the first of them, as messages show it."""


def find_repeated(earlier: Path, later: Path, inputs: Sequence[StoredColumn]) -> RepeatedRows:
    """Returns the rows of the later file whose values in these columns are those of a row of the earlier one; both are
    files of load_data that have the columns."""
    known = np.concatenate(
        [np.zeros(0, np.uint64), *(hash_rows(block, inputs) for block in read_batches(earlier, mapped=False))]
    )
    rows, repeated, first = 0, 0, None
    for block in read_batches(later, mapped=False):
        found = np.flatnonzero(np.isin(hash_rows(block, inputs), known))
        if first is None and len(found):
            first = shorten(block.column(inputs[0].name)[int(found[0])].as_py())
        rows, repeated = rows + len(block), repeated + len(found)
    return RepeatedRows(rows=rows, repeated=repeated, first=first)


class DuplicateTexts(HashedRows):
    """The hashed texts of all splits."""

    def __init__(self, wanted: SourceColumns, folder: Path) -> None:
        super().__init__(folder, wanted.inputs[0], wanted.labels)
        self._inputs = wanted.inputs
        self._rating = next((column for column in wanted.columns if column.is_label and column.form == "boolean"), None)
        self._whole = wanted.columns if wanted.task_type.repeats_inputs else ()
        self._answers = [column for column in wanted.columns if column.target and column.form == "content"]

    def add(self, split: str, block: Block, hashes: Hashes) -> None:
        """Adds the rows of a block. None may miss a text or label."""
        rows = self._splits.setdefault(split, _Rows())
        if self._labels:
            rows.labels.append(_hash_labels(block.rows.column(self._labels.name)))
        elif self._whole:
            rows.judged.append(hash_rows(block.rows, self._whole))
            rows.labels.append(np.zeros(len(hashes), np.int32))
        elif judgements := self._judgements(block.rows, hashes):
            rows.judged.append(judgements[0])
            rows.labels.append(judgements[1])
        super().add(split, block, hashes)

    def _judgements(
        self, rows: pa.RecordBatch, prompts: Hashes
    ) -> tuple[Hashes, np.ndarray[Any, np.dtype[np.int32]]] | None:
        """Returns a hash of what each row judges, and the judgement: the rating of an answer, or which of two answers
        is the better one. None for rows without judgements."""
        answers = [hash_rows(rows, [column]) for column in self._answers]
        if self._rating is not None and (len(answers) == 1 or "messages" in rows.schema.names):
            judged = prompts * _ODD[0] + answers[0] if answers else prompts  # messages end with the answer
            return judged, rows.column(self._rating.name).cast(pa.int32()).to_numpy()
        if self._rating is None and len(answers) == 2:
            low, high = np.sort(answers, axis=0)
            return prompts * _ODD[0] + low * _ODD[1] + high, (answers[0] == low).astype(np.int32)
        return None

    @property
    def has_images(self) -> bool:
        return any(column.form == "image" for column in self._inputs)

    def inputs_of(self, split: str) -> Iterator[tuple[Any, ...]]:
        """Yields the inputs of each row of a split, in order."""
        for batch in read_batches(self._folder / split, mapped=False):
            yield from zip(*(batch.column(column.name).to_pylist() for column in self._inputs), strict=True)

    def within(self, split: str) -> Equal | None:
        """Returns the rows whose text is in an earlier row of the split; of rows that may repeat their inputs, those
        that are equal; of ratings and preferences, those that repeat a judgement: a prompt may have several answers."""
        hashes, order = self._sort_hashes(split)
        if (rows := self._splits.get(split)) and rows.judged:
            judgements = np.concatenate(rows.judged) + np.concatenate(rows.labels).astype(np.uint64)
            order = np.argsort(judgements, kind="stable")
            hashes = judgements[order]
        repeats = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
        if not len(repeats):
            return None
        later = repeats[np.argmin(order[repeats])]
        return self._example(len(repeats), split, order[later], split, order[np.searchsorted(hashes, hashes[later])])

    def conflicts(self, split: str) -> Equal | None:
        """Returns the texts with different labels in different rows of the split, or the answers that are judged in
        opposite ways."""
        if not (rows := self._splits.get(split)) or not rows.labels:
            return None
        if rows.judged:
            judged = np.concatenate(rows.judged)
            order = np.argsort(judged, kind="stable")
            hashes = judged[order]
        else:
            hashes, order = self._sort_hashes(split)
        if not len(hashes):
            return None
        labels = np.concatenate(self._splits[split].labels)[order]
        starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        group = np.repeat(np.arange(len(starts)), np.diff([*starts, len(hashes)]))
        conflicting = np.flatnonzero(labels != labels[starts][group])
        if not len(conflicting):
            return None
        later = conflicting[np.argmin(order[conflicting])]
        count = len(np.unique(group[conflicting]))
        return self._example(count, split, order[later], split, order[starts[group[later]]])


def _hash_labels(labels: pa.Array) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns a code of each row's label or list of labels. Two among N different ones collide
    with a chance of N² / 2³³."""
    if pa.types.is_nested(labels.type):
        labels = pa.array(_spell(labels), pa.string())
    coded = labels.dictionary_encode()
    digests = b"".join(
        hashlib.blake2b((whole_number(label) or label).encode(), digest_size=4).digest()
        for label in coded.dictionary.to_pylist()
    )
    return np.frombuffer(digests, "<i4").astype(np.int32)[coded.indices.to_numpy()]


def _item_at(pieces: list[Any], position: int) -> Any:
    for piece in pieces:
        if position < len(piece):
            return piece[position]
        position -= len(piece)
    raise IndexError(position)
