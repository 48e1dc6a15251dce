"""What one pass over the rows learns: counts, lengths, and faults with the numbers of their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.ipc import Spread
from training.problems import Problem
from training.rows.blocks import Block, columns
from training.rows.checks import MISSING_WORDS, ROW_CHECKS, level_of

if TYPE_CHECKING:
    from training.recipe import Data

ROWS_NAMED = 3  # of the rows with the same fault, as many are named in its message
MENDS = {"encoding": "set data.encoding to what the file is written in, "}
"""What mends all rows of a file at once, by check."""


@dataclass(frozen=True)
class _Sort:
    """One sort of fault in one file."""

    where: str
    check: str
    what: str


class Faults:
    """Faulty rows, by file and fault: how many there are, and the numbers of the first of them."""

    def __init__(self) -> None:
        self._counts: Counter[_Sort] = Counter()
        self._first: dict[_Sort, list[int]] = {}
        self._value: dict[_Sort, str] = {}

    def add(self, where: str, check: str, what: str, rows: Sequence[int], value: str = "") -> None:
        """Adds rows with the same fault."""
        if rows:
            sort = _Sort(where, check, what)
            named = self._first.setdefault(sort, [])
            named += rows[: ROWS_NAMED - len(named)]
            self._counts[sort] += len(rows)
            self._value.setdefault(sort, value)

    def problems(self, data: Data) -> Iterator[Problem]:
        """One problem for each sort of fault in each file, none for what the recipe ignores."""
        for sort, total in self._counts.items():
            level = level_of(sort.check, data)
            if level == "ignore":
                continue
            rows = self._first[sort]
            more = ", …" if total > len(rows) else ""
            like = f" ({total:,} rows like this: {', '.join(map(str, rows))}{more})" if total > 1 else ""
            them = "them" if total > 1 else "it"
            mend = MENDS.get(sort.check, "") if data.source in ("csv", "json") else ""
            end = f"{mend}correct or remove {them}, or leave {them} out: data.checks.{sort.check}: warning."
            if level == "warning":
                end = "left out."
            message = f"{sort.what}{self._value[sort]}{like}: {end}"
            where = f"{sort.where} row {rows[0]}"
            yield Problem(kind="data", where=where, message=message, check=sort.check, level=level)


@dataclass
class Survey:
    """What the pass learns of one split."""

    split: str
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
    characters: Spread = field(default_factory=Spread)
    missing_words: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """Column and word: how many texts are that word, and the first row, as a message names it."""

    def add(self, block: Block, data: Data) -> None:
        """Counts rows that will be kept."""
        self.rows += block.rows.num_rows
        self.named = self.named or block.label_names
        texts = {ours: theirs for ours, theirs in columns(data).items() if ours != "label"}
        lengths = [pc.utf8_length(block.rows.column(name)) for name in texts]
        self.characters.add(sum(length.to_numpy(zero_copy_only=False) for length in lengths))
        for value in pc.value_counts(block.rows.column("label")).to_pylist():
            self.labels[value["values"]] += value["counts"]
            if value["values"] not in self.first:
                self.first[value["values"]] = _named(
                    block, pc.index(block.rows.column("label"), value["values"]).as_py()
                )
        for ours, theirs in texts.items():
            self._count_missing_words(block, ours, theirs)

    def as_if_corrected(self) -> None:
        """Counts the rows that were left out as well: what follows from a mistake is no second one."""
        self.corrected = True
        self.rows += self.left_out
        self.labels.update({label: count for label, count in self.labels_left_out.items() if label.strip()})
        for label in self.labels:
            self.first.setdefault(label, f"the {self.split} split")

    def leave_out_unknown(self, places: Mapping[str, int]) -> None:
        """Counts rows whose label is none of these as left out."""
        gone = sum(count for label, count in self.labels.items() if label not in places)
        self.rows -= gone
        self.left_out += gone

    def _count_missing_words(self, block: Block, ours: str, theirs: str) -> None:
        column = block.rows.column(ours)
        short = pc.indices_nonzero(pc.less_equal(pc.utf8_length(column), max(map(len, MISSING_WORDS))))
        spelt = pc.utf8_lower(pc.utf8_trim_whitespace(column.take(short)))
        for place in short.filter(pc.is_in(spelt, value_set=pa.array(MISSING_WORDS))).to_pylist():
            word = column[place].as_py()
            count, first = self.missing_words.get((theirs, word), (0, _named(block, place)))
            self.missing_words[theirs, word] = count + 1, first


def without_faulty(block: Block, data: Data, survey: Survey, faults: Faults) -> Block:
    """The block without the rows that a check of single rows finds; `faults` learns of them, and of the reader's."""
    for fault in block.faults:
        faults.add(block.where, fault.check, fault.what, [fault.row], fault.value)
    bad = np.zeros(block.rows.num_rows, bool)
    for check, find in ROW_CHECKS.items():
        for what, wrong in find(block.rows, data):
            faults.add(block.where, check, what, block.numbers[wrong].tolist())
            bad |= wrong
    survey.left_out += len(block.faults) + int(bad.sum())
    if not bad.any():
        return block
    survey.labels_left_out.update(block.rows.column("label").filter(pa.array(bad)).drop_null().to_pylist())
    return block.taken(~bad)


def _named(block: Block, place: int) -> str:
    return f"{block.where} row {block.numbers[place]}"
