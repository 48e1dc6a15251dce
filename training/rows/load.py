"""Rows of any source, checked, as Arrow files that say the same for the same rows.

Two passes: the first reads each source once, checks its rows and keeps them on disk as they are written;
only then are all labels known, and the second turns each into its place among the label names. Memory
holds one block of rows, the distinct labels and the distinct text lengths, however many rows there are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.ipc import Spread, in_blocks, ipc_reader, ipc_writer
from training.problems import Problem, UserError
from training.rows.reading import READERS, Block, columns
from training.rows.sources import split_names

if TYPE_CHECKING:
    from training.recipe import Data

SPLITS = ("train", "validation", "test")
MOST_LABELS = 10_000  # more distinct values than this are no labels but, most likely, the wrong column
ROWS_NAMED = 3  # of the rows with the same fault, as many are named in its message

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def load(data: Data, sources: Mapping[str, Any], out: Path) -> dict[str, int]:
    """Writes the rows of every split to the folder `out`, with their labels and a report; gives the rows a
    split and the number of labels.

    `sources` is what was pinned: the files of each split (`{"train": ["/data/train.csv"]}`), the commit of a
    Hub data set (`{"commit": "<40 hex digits>"}`), or nothing for a callable.

    `out` gets `<split>.arrow` with columns `text`, for pairs `text_pair`, and `label` (int64, a place in
    `labels.json`); `labels.json` (names in order); `report.json` (rows, label counts and characters a split).
    Raises UserError with every problem of all splits; what `out` holds then is of no use.
    """
    out.mkdir(parents=True, exist_ok=True)
    named = split_names(data) if data.source in ("hub", "python") else sources
    with TemporaryDirectory(dir=out, prefix=".as-written-") as held:
        surveys: dict[str, Survey] = {}
        problems: list[Problem] = []
        for split in (split for split in SPLITS if split in named):
            try:
                surveys[split] = _survey(data, split, sources, Path(held, split))
                problems += surveys[split].faults.problems()
            except UserError as error:
                problems += error.problems
        places: dict[str, int] = {}
        if "train" in surveys:
            names, places = label_places(data.label_names, surveys["train"].named, surveys["train"].labels)
            problems += [p for survey in surveys.values() for check in SPLIT_CHECKS for p in check(survey, places)]
        if problems:
            raise UserError(dict.fromkeys(problems))  # what is wrong with the whole source is told once
        for split in surveys:
            _place_labels(Path(held, split), out / f"{split}.arrow", places)
    _write_json(out / "labels.json", names)
    _write_json(out / "report.json", _report(surveys, names, places))
    return {f"{split}_rows": survey.rows for split, survey in surveys.items()} | {"labels": len(names)}


def label_places(
    wanted: Sequence[str] | None, stored: Sequence[str], seen: Mapping[str, int]
) -> tuple[list[str], dict[str, int]]:
    """The label names in order, and the place of each label as the rows write it.

    The order is that of the source where it names its labels, else that of the labels seen in the training
    rows: by value where all are whole numbers, else by spelling. Names that the recipe wants replace it:
    rows may spell these names; or whole numbers that count them from 0; or as many other whole numbers, in
    increasing order.
    """
    natural = list(stored) or sorted(seen, key=int if all(map(_is_number, seen)) else str)
    if wanted is None:
        return natural, {label: place for place, label in enumerate(natural)}
    names = list(wanted)
    if natural and all(map(_is_number, natural)) and not set(natural) <= set(names):
        numbers = sorted(natural, key=int)
        if all(0 <= int(label) < len(names) for label in numbers):
            return names, {str(place): place for place in range(len(names))}
        if len(numbers) == len(names):
            return names, {label: place for place, label in enumerate(numbers)}
    return names, {name: place for place, name in enumerate(names)}


def _is_number(label: str) -> bool:
    """Whether it is spelt as Python spells a whole number: `-1`, but not `01` or `1.0`."""
    return label.isascii() and label.removeprefix("-").isdecimal() and str(int(label)) == label


@dataclass
class Faults:
    """Faulty rows, by file and fault: how many there are, and the numbers of the first of them."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, where: str, what: str, rows: Sequence[int]) -> None:
        if rows:
            named = self.first.setdefault((where, what), [])
            named += rows[: ROWS_NAMED - len(named)]
            self.counts[where, what] += len(rows)

    def problems(self) -> Iterator[Problem]:
        """One problem for each sort of fault in each file."""
        for (where, what), total in self.counts.items():
            rows = self.first[where, what]
            more = ", …" if total > len(rows) else ""
            like = f" ({total} rows like this: {', '.join(map(str, rows))}{more})" if total > 1 else ""
            message = f"{what}{like}: correct or remove {'them' if total > 1 else 'it'}."
            yield Problem(kind="data", where=f"{where} row {rows[0]}", message=message)


@dataclass
class Survey:
    """What the first pass learns of one split."""

    split: str
    rows: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """The first row of each label, as a message names it."""
    named: tuple[str, ...] = ()
    """All labels in order, where the source names them."""
    characters: Spread = field(default_factory=Spread)
    faults: Faults = field(default_factory=Faults)

    def add(self, block: Block, data: Data) -> None:
        self.rows += block.rows.num_rows
        self.named = self.named or block.label_names
        for fault in block.faults:
            self.faults.add(block.where, fault.what, [fault.row])
        for check in ROW_CHECKS:
            for what, wrong in check(block.rows, data):
                self.faults.add(block.where, what, [block.numbers[place] for place in np.flatnonzero(wrong).tolist()])
        lengths = [pc.utf8_length(block.rows.column(name)) for name in columns(data) if name != "label"]
        self.characters.add(sum(length.fill_null(0).to_numpy(zero_copy_only=False) for length in lengths))
        self._count_labels(block)

    def _count_labels(self, block: Block) -> None:
        column = block.rows.column("label")
        labels = column.filter(pa.array(~_blank(column)))
        for value in pc.value_counts(labels).to_pylist():
            label = value["values"]
            self.labels[label] += value["counts"]
            if label not in self.first:
                row = block.numbers[pc.index(column, label).as_py()]
                self.first[label] = f"{block.where} row {row}"


def _survey(data: Data, split: str, sources: Mapping[str, Any], as_written: Path) -> Survey:
    """Reads one split, checks its rows, and keeps them in the file `as_written`."""
    survey = Survey(split)
    with ipc_writer(as_written, pa.schema([(name, pa.string()) for name in columns(data)])) as writer:
        for block in READERS[data.source](data, split, sources):
            survey.add(block, data)
            writer.write(block.rows)
            if len(survey.labels) > MOST_LABELS:
                message = (
                    f"column {data.label!r} has more than {MOST_LABELS} different values in the {split} "
                    "split: is it the column of labels?"
                )
                raise UserError([Problem(kind="data", where="data.label", message=message)])
    return survey


def blank_texts(rows: pa.RecordBatch, data: Data) -> Iterator[tuple[str, Mask]]:
    """Rows without a text: the model would learn from nothing."""
    for name, theirs in columns(data).items():
        if name != "label":
            yield f"has no text in column {theirs!r}", _blank(rows.column(name))


def blank_labels(rows: pa.RecordBatch, data: Data) -> Iterator[tuple[str, Mask]]:
    """Rows without a label."""
    yield f"has no label in column {data.label!r}", _blank(rows.column("label"))


def _blank(column: pa.Array) -> Mask:
    blank = pc.equal(pc.utf8_trim_whitespace(column), "").fill_null(True)
    mask: Mask = blank.to_numpy(zero_copy_only=False)
    return mask


def no_rows(survey: Survey, places: Mapping[str, int]) -> Iterator[Problem]:
    """A split without rows: nothing to learn from, or nothing to judge by."""
    if not survey.rows:
        message = f"the {survey.split} split has no rows: choose another or, for test, leave it out."
        yield Problem(kind="data", where=f"data.splits.{survey.split}", message=message)


def unknown_labels(survey: Survey, places: Mapping[str, int]) -> Iterator[Problem]:
    """Labels that the model has no output for."""
    for label, count in survey.labels.items():
        if label not in places:
            rows = "1 row" if count == 1 else f"{count} rows"
            known = ", ".join(list(places)[:20]) + (", …" if len(places) > 20 else "")
            hidden = " At the Hub -1 stands for a label kept back: leave this split out." if label == "-1" else ""
            message = f"label {label!r} ({rows} of {survey.split}) is unknown: choose from {known}.{hidden}"
            yield Problem(kind="data", where=survey.first[label], message=message)


def single_label(survey: Survey, places: Mapping[str, int]) -> Iterator[Problem]:
    """Training rows that all say the same teach nothing."""
    labels = [label for label in survey.labels if label in places]
    if survey.split == "train" and survey.rows and len(labels) < 2:
        has = f"only the label {labels[0]!r}" if labels else "no known label"
        message = f"the train split has {has}: it needs rows of at least two labels."
        yield Problem(kind="data", where="data.label", message=message)


RowCheck = Callable[[pa.RecordBatch, "Data"], Iterator[tuple[str, Mask]]]
SplitCheck = Callable[[Survey, Mapping[str, int]], Iterator[Problem]]

ROW_CHECKS: tuple[RowCheck, ...] = (blank_texts, blank_labels)
"""Each sees the rows of one block as they are written and gives what is wrong, and with which of them."""

SPLIT_CHECKS: tuple[SplitCheck, ...] = (no_rows, unknown_labels, single_label)
"""Each sees what was learnt of a whole split, and the place of each label as rows write it."""


def _place_labels(as_written: Path, final: Path, places: Mapping[str, int]) -> None:
    """The same rows with each label's place in its stead."""
    spelt, values = pa.array(list(places), pa.string()), pa.array(list(places.values()), pa.int64())
    with ipc_reader(as_written) as reader:
        texts = [column for column in reader.schema if column.name != "label"]
        schema = pa.schema([*texts, ("label", pa.int64())])
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        placed = (
            pa.RecordBatch.from_arrays(
                [*batch.columns[:-1], values.take(pc.index_in(batch.column("label"), value_set=spelt))],
                schema=schema,
            )
            for batch in batches
        )
        with ipc_writer(final, schema) as writer:
            for block in in_blocks(placed, schema):
                writer.write(block)


def _report(surveys: Mapping[str, Survey], names: Sequence[str], places: Mapping[str, int]) -> dict[str, Any]:
    counts: dict[str, dict[str, int]] = {split: dict.fromkeys(names, 0) for split in surveys}
    for split, survey in surveys.items():
        for label, count in survey.labels.items():
            counts[split][names[places[label]]] += count
    return {
        "rows": {split: survey.rows for split, survey in surveys.items()},
        "labels": counts,
        "characters": {split: survey.characters.summary() for split, survey in surveys.items()},
        "problems": [],
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
