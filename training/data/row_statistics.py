"""What one pass over the rows learns: counts, lengths, and faults with the numbers of their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.data.arrow_files import Spread
from training.data.blocks import HEADER_READ, REPEATED_HEADER, Block
from training.data.checks import MISSING_WORDS, ROW_CHECKS, level_of
from training.data.lists import flat_values, row_sums, rows_with_any
from training.data.plain_types import is_list
from training.problems import Problem
from training.recipe.source_columns import SourceColumns, StoredColumn

if TYPE_CHECKING:
    from training.recipe.column_types import Mask

ROWS_NAMED = 3  # of the rows with the same fault, as many are named in its message
FIXES = {"encoding": "set data.encoding to what the file is written in, "}
"""What mends all rows of a file at once, by check."""
ADVICE = {
    "stray_quotes": "if they do, set data.quoting: none; if not, data.checks.stray_quotes: ignore.",
    "line_breaks": (
        "if its quotation mark belongs to the text and swallows other rows, set data.quoting: none; if the text has "
        "these lines, data.checks.line_breaks: ignore."
    ),
    "merged_rows": (
        "correct the quotation mark, or, where such marks belong to the text, set data.quoting: none; if all of this "
        "is one text, data.checks.merged_rows: ignore."
    ),
    "header_row": (
        "if the table has no header, name its columns in data.header; if these are names, data.checks.header_row: "
        "ignore."
    ),
    HEADER_READ: (
        "if it is a header, remove data.header, and name columns anew in data.rename; if it is a row of data, "
        "data.checks.header_row: ignore."
    ),
    REPEATED_HEADER: "if it is no row of data, remove it from the file; if it is one, data.checks.header_row: ignore.",
}
"""The next step for rows that are kept, by check, or by fault where one check has several."""


@dataclass(frozen=True)
class _Sort:
    """One sort of fault in one file."""

    where: str
    check: str
    description: str


class Faults:
    """Faulty rows, by file and fault: how many there are, and the numbers of the first of them."""

    def __init__(self) -> None:
        self._counts: Counter[_Sort] = Counter()
        self._first: dict[_Sort, list[int]] = {}
        self._value: dict[_Sort, str] = {}

    def add(self, where: str, check: str, description: str, rows: Sequence[int], value: str = "") -> None:
        """Adds rows with the same fault."""
        if rows:
            sort = _Sort(where, check, description)
            named = self._first.setdefault(sort, [])
            named += rows[: ROWS_NAMED - len(named)]
            self._counts[sort] += len(rows)
            self._value.setdefault(sort, value)

    def told(self) -> Iterator[tuple[_Sort, str, str, str]]:
        """Each sort of fault in each file: where its first row is, what is wrong with that one, and how many are like
        it; and whether to speak of `it` or `them`."""
        for sort, total in self._counts.items():
            rows = self._first[sort]
            more = ", …" if total > len(rows) else ""
            like = f" ({total:,} rows like this: {', '.join(map(str, rows))}{more})" if total > 1 else ""
            description = f"{sort.description}{self._value[sort]}{like}"
            yield sort, f"{sort.where} row {rows[0]}", description, "them" if total > 1 else "it"

    def problems(self, wanted: SourceColumns) -> Iterator[Problem]:
        """One problem for each sort of fault in each file, none for what the recipe ignores."""
        for sort, where, description, them in self.told():
            level = level_of(sort.check, wanted)
            if level == "ignore":
                continue
            if advice := ADVICE.get(sort.description) or ADVICE.get(sort.check):
                yield Problem(
                    kind="data", where=where, message=f"{description}: {advice}", check=sort.check, level=level
                )
                continue
            mend = FIXES.get(sort.check, "") if wanted.data.source in ("csv", "json") else ""
            end = f"{mend}correct or remove {them}, or leave {them} out: data.checks.{sort.check}: warning."
            if level == "warning":
                end = "left out."
            yield Problem(kind="data", where=where, message=f"{description}: {end}", check=sort.check, level=level)


@dataclass
class SplitStatistics:
    """What the pass learns of one split."""

    split: str
    wanted: SourceColumns
    held_out: float | None = None
    """The share of train that this split is, where it is cut from it."""
    rows: int = 0
    filtered: int = 0
    left_out: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    corrected: bool = False
    labels_left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """The first row of each label, as a message names it."""
    named: tuple[str, ...] = ()
    """All labels in order, where the source names them."""
    only_number: dict[StoredColumn, float | None] = field(default_factory=dict)
    """For each column of numbers to predict: the number that all rows have; None where they differ."""
    characters: Spread = field(default_factory=Spread)
    missing_words: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """Column and word: how many texts are that word, and the first row, as a message names it."""

    def add(self, block: Block) -> None:
        """Counts rows that will be kept."""
        self.rows += block.rows.num_rows
        self.named = self.named or block.label_names
        self.characters.add(_lengths(block.rows, self.wanted.inputs))
        if self.wanted.labels:
            self._count_labels(block, block.rows.column(self.wanted.labels.name))
        for column in self.wanted.columns:
            if column.form == "number" and column.is_target and block.rows.num_rows:
                least, most = pc.min_max(block.rows.column(column.name)).as_py().values()
                same = least == most == self.only_number.get(column, least)
                self.only_number[column] = least if same else None
        for column in self.wanted.contents:
            if column.form == "text":
                self._count_missing_words(block, column)

    def _count_labels(self, block: Block, column: pa.Array) -> None:
        labels = flat_values(column)
        for value in pc.value_counts(labels).to_pylist():
            self.labels[value["values"]] += value["counts"]
            if value["values"] not in self.first:
                place = pc.index(labels, value["values"]).as_py()
                row = pc.list_parent_indices(column)[place].as_py() if is_list(column.type) else place
                self.first[value["values"]] = _named(block, row)

    def as_if_corrected(self) -> None:
        """Counts the rows that were left out as well: what follows from a mistake is no second one."""
        self.corrected = True
        self.rows += self.left_out
        self.labels.update({label: count for label, count in self.labels_left_out.items() if label.strip()})
        for label in self.labels:
            self.first.setdefault(label, f"the {self.split} split")

    def leave_out_unknown(self, places: Mapping[str, int], written: Iterable[pa.RecordBatch]) -> None:
        """Counts rows with a label that is none of these as left out; `written` are the split's rows."""
        unknown = {label: count for label, count in self.labels.items() if label not in places}
        if not unknown or self.wanted.labels is None:
            return
        removed = 0
        for batch in written:
            labels = batch.column(self.wanted.labels.name)
            bad = has_unknown(labels, pa.array(list(places), pa.string()))
            removed += int(bad.sum())
            for value in pc.value_counts(flat_values(labels.filter(pa.array(bad)))).to_pylist():
                self.labels[value["values"]] -= value["counts"]
        self.labels.update(unknown)  # which are still to be told of
        self.labels = +self.labels  # without those that only such rows had
        self.rows -= removed
        self.left_out += removed

    def _count_missing_words(self, block: Block, column: StoredColumn) -> None:
        texts = block.rows.column(column.name)
        short = pc.indices_nonzero(pc.less_equal(pc.utf8_length(texts), max(map(len, MISSING_WORDS))))
        spelt = pc.utf8_lower(pc.utf8_trim_whitespace(texts.take(short)))
        for place in short.filter(pc.is_in(spelt, value_set=pa.array(MISSING_WORDS))).to_pylist():
            word = texts[place].as_py()
            count, first = self.missing_words.get((column.source_name, word), (0, _named(block, place)))
            self.missing_words[column.source_name, word] = count + 1, first


def without_faulty(block: Block, statistics: SplitStatistics, faults: Faults) -> Block:
    """The block without the rows that a check of single rows finds; `faults` learns of them, and of the reader's."""
    for fault in block.faults:
        faults.add(block.where, fault.check, fault.description, [fault.row], fault.value)
    statistics.left_out += len(block.faults)
    for remark in block.remarks:
        faults.add(block.where, remark.check, remark.description, [remark.row], remark.value)
    of_all = ((check, *found) for check, find in ROW_CHECKS.items() for found in find(block.rows, statistics.wanted))
    block = _without(block, of_all, statistics, faults)
    return _without(block, statistics.wanted.task_type.faults(block.rows), statistics, faults)


def _without(
    block: Block,
    found: Iterable[tuple[str, str, Mask] | tuple[str, str, Mask, str]],
    statistics: SplitStatistics,
    faults: Faults,
) -> Block:
    bad = np.zeros(block.rows.num_rows, bool)
    for check, description, wrong, *of_first in found:
        faults.add(block.where, check, description, block.numbers[wrong].tolist(), *of_first)
        bad |= wrong
    if not bad.any():
        return block
    statistics.left_out += int(bad.sum())
    if statistics.wanted.labels:
        labels = block.rows.column(statistics.wanted.labels.name).filter(pa.array(bad))
        statistics.labels_left_out.update(flat_values(labels).drop_null().to_pylist())
    return block.taken(~bad)


def has_unknown(labels: pa.Array, known: pa.Array) -> Mask:
    """The rows whose label, or one of whose labels, is none of these."""
    unknown = pc.invert(pc.is_in(flat_values(labels), value_set=known))
    return rows_with_any(labels, unknown) if is_list(labels.type) else unknown.to_numpy(zero_copy_only=False)


def _lengths(rows: pa.RecordBatch, columns: Iterable[StoredColumn]) -> np.ndarray[Any, np.dtype[Any]]:
    """The characters of each row, those of all its texts together."""
    lengths = np.zeros(rows.num_rows, np.int64)
    for column in columns:
        values = rows.column(column.name)
        if column.form in ("text", "value"):
            lengths += pc.utf8_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        elif column.form == "texts":
            lengths += row_sums(values, pc.utf8_length(flat_values(values)))
    return lengths


def _named(block: Block, place: int) -> str:
    return f"{block.where} row {block.numbers[place]}"
