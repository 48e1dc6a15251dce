"""Statistics of each split from one pass over its rows: counts of rows and labels, lengths of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.data.arrow_columns import flat_values, is_list, row_sums
from training.data.ipc_files import Spread
from training.data.label_indices import has_unknown
from training.data.readers import Block
from training.recipe.row_split import Kind
from training.recipe.source_columns import SourceColumns, StoredColumn

# Words that programs write for a missing value. In a file they are ordinary texts.
MISSING_WORDS = ("na", "n/a", "nan", "null", "none", "<na>")


@dataclass
class SplitStatistics:
    """The statistics of one split."""

    split: str
    wanted: SourceColumns
    held_out: float | None = None
    """The share of train, if the split is cut from it."""
    rows: int = 0
    filtered: int = 0
    in_gap: int = 0
    """Rows of train that are in no split, because they are too near to the next one by time."""
    dropped: int = 0
    """Rows that data.corrections leaves out."""
    times: tuple[float, float, Kind] | None = None
    """The first and the last time of the rows, and their kind."""
    left_out: int = 0
    without_rows: list[str] = field(default_factory=list)
    """The files that have no rows."""
    labels: Counter[str] = field(default_factory=Counter)
    corrected: bool = False
    labels_left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """The first row of each label, as messages name it."""
    named: tuple[str, ...] = ()
    """All labels in order, if the source defines them."""
    only_number: dict[StoredColumn, float | None] = field(default_factory=dict)
    """For each column of numbers to predict, and of ratings: the number that all rows have (1 for true, 0 for false);
    None if they differ."""
    characters: Spread = field(default_factory=Spread)
    repeats_text: int = 0
    """Rows whose label is one of their texts."""
    missing_words: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """By column and word: the number of texts that are this word, and the first such row, as messages name it."""

    def add(self, block: Block) -> None:
        """Counts rows that will be kept."""
        self.rows += block.rows.num_rows
        self.named = self.named or block.label_names
        self.characters.add(text_lengths(block.rows, self.wanted.inputs))
        if self.wanted.labels:
            self._count_labels(block, block.rows.column(self.wanted.labels.name))
        for column in self.wanted.columns:
            if column.form in ("number", "boolean") and column.is_target and block.rows.num_rows:
                least, most = map(float, pc.min_max(block.rows.column(column.name)).as_py().values())
                is_constant = least == most == self.only_number.get(column, least)
                self.only_number[column] = least if is_constant else None
        for column in self.wanted.contents:
            if column.form == "text":
                self._count_missing_words(block, column)
                if self.wanted.labels and self.wanted.labels.form == "label":
                    label = block.rows.column(self.wanted.labels.name)
                    self.repeats_text += pc.sum(pc.equal(block.rows.column(column.name), label)).as_py() or 0

    def add_times(self, times: np.ndarray[Any, np.dtype[np.float64]], kind: Kind) -> None:
        """Adds the times of rows that are kept."""
        if len(times):
            first, last, _ = self.times or (np.inf, -np.inf, kind)
            self.times = min(first, float(times.min())), max(last, float(times.max())), kind

    def _count_labels(self, block: Block, column: pa.Array) -> None:
        labels = flat_values(column)
        for value in pc.value_counts(labels).to_pylist():
            self.labels[value["values"]] += value["counts"]
            if value["values"] not in self.first:
                place = pc.index(labels, value["values"]).as_py()
                row = pc.list_parent_indices(column)[place].as_py() if is_list(column.type) else place
                self.first[value["values"]] = _row_name(block, row)

    def as_if_corrected(self) -> None:
        """Also counts the rows that were left out, so that no consequence of their problems is reported too."""
        self.corrected = True
        self.rows += self.left_out
        self.labels.update({label: count for label, count in self.labels_left_out.items() if label.strip()})
        for label in self.labels:
            self.first.setdefault(label, f"the {self.split} split")

    def leave_out_unknown(self, places: Mapping[str, int], written: Iterable[pa.RecordBatch]) -> None:
        """Counts rows with an unknown label as left out; `written` are the split's rows."""
        unknown = {label: count for label, count in self.labels.items() if label not in places}
        if not unknown or self.wanted.labels is None:
            return
        removed = 0
        for batch in written:
            labels = batch.column(self.wanted.labels.name)
            is_unknown = has_unknown(labels, pa.array(list(places), pa.string()))
            removed += int(is_unknown.sum())
            for value in pc.value_counts(flat_values(labels.filter(pa.array(is_unknown)))).to_pylist():
                self.labels[value["values"]] -= value["counts"]
        self.labels.update(unknown)  # they are reported later
        self.labels = +self.labels  # without labels that only such rows had
        self.rows -= removed
        self.left_out += removed

    def _count_missing_words(self, block: Block, column: StoredColumn) -> None:
        texts = block.rows.column(column.name)
        candidates = pc.indices_nonzero(pc.less_equal(pc.utf8_length(texts), max(map(len, MISSING_WORDS))))
        words = pc.utf8_lower(pc.utf8_trim_whitespace(texts.take(candidates)))
        for place in candidates.filter(pc.is_in(words, value_set=pa.array(MISSING_WORDS))).to_pylist():
            word = texts[place].as_py()
            count, first = self.missing_words.get((column.source_name, word), (0, _row_name(block, place)))
            self.missing_words[column.source_name, word] = count + 1, first


def joined(parts: Sequence[SplitStatistics], wanted: SourceColumns) -> SplitStatistics:
    """Returns the statistics of the same split of several sets together."""
    if len(parts) == 1:
        return parts[0]
    shares = {part.held_out for part in parts}
    found = SplitStatistics(parts[0].split, wanted, shares.pop() if len(shares) == 1 else None)
    for part in parts:
        found.rows += part.rows
        found.filtered += part.filtered
        found.in_gap += part.in_gap
        found.left_out += part.left_out
        found.without_rows += part.without_rows
        found.repeats_text += part.repeats_text
        found.labels.update(part.labels)
        found.labels_left_out.update(part.labels_left_out)
        found.corrected |= part.corrected
        found.first = part.first | found.first
        found.characters.join(part.characters)
        for key, (count, first) in part.missing_words.items():
            before, earlier = found.missing_words.get(key, (0, first))
            found.missing_words[key] = before + count, earlier
    spans = [part.times for part in parts if part.times is not None]
    if len({kind for _, _, kind in spans}) == 1:
        found.times = min(first for first, _, _ in spans), max(last for _, last, _ in spans), spans[0][2]
    # Columns are compared by their role: sets may name them differently.
    for column in wanted.columns:
        numbers = {n for part in parts for other, n in part.only_number.items() if other.name == column.name}
        if numbers:
            found.only_number[column] = numbers.pop() if len(numbers) == 1 else None
    if all(part.named for part in parts):
        found.named = tuple(dict.fromkeys(name for part in parts for name in part.named))
    return found


def text_lengths(rows: pa.RecordBatch, columns: Iterable[StoredColumn]) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns the characters of each row, over all its texts."""
    lengths = np.zeros(rows.num_rows, np.int64)
    for column in columns:
        values = rows.column(column.name)
        if column.form in ("text", "value", "content"):
            lengths += pc.utf8_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        elif column.form == "texts":
            lengths += row_sums(values, pc.utf8_length(flat_values(values)))
    return lengths


def texts_of(rows: pa.RecordBatch, columns: Iterable[StoredColumn]) -> Iterator[str]:
    """Yields the texts whose characters `text_lengths` counts, column by column."""
    for column in columns:
        if column.form in ("text", "value", "content", "texts"):
            values = rows.column(column.name)
            yield from (text for text in flat_values(values).to_pylist() if text is not None)


def _row_name(block: Block, place: int) -> str:
    return f"{block.where} row {block.numbers[place]}"
