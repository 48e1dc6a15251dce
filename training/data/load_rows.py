"""load_data: rows of any source, checked, as Arrow files whose bytes depend on the rows alone.

Two passes. The first reads each source once, checks its rows, holds rows out, and keeps all on disk with labels as
names. Then all labels are known, and the second pass replaces each by its index in the label names. Memory: some blocks
of rows, the distinct labels and text lengths, and some bytes a row to find equal texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.data.arrow_files import in_blocks, ipc_reader, ipc_writer
from training.data.blocks import SPLITS, Block, Numbers
from training.data.casting import UNCODED_TYPES, CastBlock, cast_blocks
from training.data.checks import SPLIT_CHECKS, without_faulty
from training.data.duplicates import DuplicateTexts, hashes_of
from training.data.faults import Faults, level_of
from training.data.holdout import held_out_shares, split_masks
from training.data.hub_datasets import hub_splits
from training.data.lists import flat_values, lists_like
from training.data.plain_types import is_list
from training.data.row_statistics import SplitStatistics, has_unknown
from training.data.slice_columns import SliceColumns
from training.data.sources import object_splits
from training.problems import Problem, UserError, user_code_errors
from training.recipe.source_columns import SourceColumns
from training.recipe.tables.formats import SOURCES

if TYPE_CHECKING:
    from training.recipe import Data
    from training.recipe.column_types import RowSpecification

MAX_LABELS = 10_000  # a column with more distinct values is probably not the one of labels
MAX_PROBLEMS = 200

Progress = Callable[[int, int], None]
Reader = Callable[[SourceColumns, str, Mapping[str, Any], SliceColumns], Iterator[Block]]
"""Yields the rows of a split in blocks."""


def load(
    data: Data,
    task_type: RowSpecification,
    sources: Mapping[str, Any],
    out: Path,
    progress: Progress = lambda done, total: None,
    evaluated: Sequence[str] = (),
) -> dict[str, int]:
    """Writes the rows of every split to the folder `out`, with their labels and a report. Returns the rows of each
    split, the number of labels and of warnings.

    `sources` is the lock of the rows: the files of each split (`{"train": ["/data/train.csv"]}`), the commit of a
    Hub data set (`{"commit": "<40 hex digits>"}`), or nothing for an object. `progress` gets the rows read and an
    estimate of all. `evaluated` are the splits that the recipe evaluates, which a Hub data set and a callable have to
    provide.

    `out` gets `<split>.arrow` with the task type's columns, in the types of RowSpecification.columns;
    `labels.json` (names in order, none for a task type without labels); `log/report.json` (rows, labels, characters
    and warnings a split). For validation and test it gets `<split>.slices.arrow`, row for row with `<split>.arrow`:
    every other column that can group rows, under the recipe's name, as dictionary<int32, string> (whole
    numbers and truths as `3` and `true`, those of a ClassLabel by their names; null for a missing value and for an
    empty text), if there is any. And `slices.json`: the names of those `kept`, and of those `left_out` with the reason.
    Raises UserError with every problem of all splits; the contents of `out` are invalid then.
    """
    out.mkdir(parents=True, exist_ok=True)
    wanted = SourceColumns(data, task_type, tuple(evaluated))
    with user_code_errors(task_type), TemporaryDirectory(dir=out, prefix=".as-written-") as kept:
        reading = _Reading(wanted, sources, Path(kept), progress)
        reading.read_all()
        names, places, problems = reading.problems_and_labels()
        if any(problem.level == "error" for problem in problems):
            raise UserError(problems)
        statistics_by_split = reading.statistics_by_split
        for split in statistics_by_split:
            removed = _place_labels(Path(kept, split), out / f"{split}.arrow", wanted, places)
            reading.slices.write(split, out / f"{split}.slices.arrow", removed)
    _write_json(out / "labels.json", names)
    _write_json(out / "slices.json", reading.slices.summary())
    _write_json(out / "log" / "report.json", _report(statistics_by_split, names, places, problems))
    rows = {f"{split}_rows": statistics.rows for split, statistics in statistics_by_split.items()}
    return rows | {"labels": len(names), "warnings": len(problems)}


def _split_shares(wanted: SourceColumns, sources: Mapping[str, Any]) -> dict[str, float]:
    """Returns the splits to read, in order, each with its share of all that is read."""
    data = wanted.data
    if data.source == "hub":
        named: Iterable[str] = hub_splits(wanted, sources)
    else:
        named = object_splits(data, wanted.evaluated) if data.source == "python" else sources
    splits = [split for split in SPLITS if split in named]
    if "train" not in splits:
        message = f"there are no rows for train: {data.path} has {', '.join(named)}. Name them in data.splits.train."
        raise UserError([Problem(kind="data", where="data.splits.train", message=message)])
    sizes = {split: sum(_size_of(file) for file in sources[split]) if split in sources else 1 for split in splits}
    return {split: size / (sum(sizes.values()) or 1) for split, size in sizes.items()}


def _load_reader(source: str) -> Reader:
    module, _, name = SOURCES[source].reader.partition(":")
    found: Reader = getattr(import_module(module), name)
    return found


def _size_of(file: str) -> int:
    path = Path(file)
    return path.stat().st_size if path.is_file() else 1


@dataclass
class _Reading:
    """The first pass."""

    wanted: SourceColumns
    sources: Mapping[str, Any]
    kept: Path
    """The folder with the rows of each split, labels as names."""
    progress: Progress
    statistics_by_split: dict[str, SplitStatistics] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    broken: list[Problem] = field(default_factory=list)
    """The problems of sources that could not be read to their end."""

    def __post_init__(self) -> None:
        self.duplicate_texts = DuplicateTexts(self.wanted, self.kept)
        self.slices = SliceColumns(self.wanted, self.kept)
        self._rows, self._before = 0, 0.0

    def read_all(self) -> None:
        """Reads every split, checks its rows, holds some out, and keeps all."""
        try:
            splits = _split_shares(self.wanted, self.sources)
        except UserError as error:
            self.broken += error.problems
            return
        for split, share in splits.items():
            self._read(split, share, held_out_shares(self.wanted.data, splits) if split == "train" else {})
        self.statistics_by_split = {
            split: self.statistics_by_split[split] for split in SPLITS if split in self.statistics_by_split
        }

    def _read(self, split: str, share: float, cuts: Mapping[str, float]) -> None:
        into = {split: SplitStatistics(split, self.wanted)}
        into |= {other: SplitStatistics(other, self.wanted, size) for other, size in cuts.items()}
        schema = pa.schema([(column.name, UNCODED_TYPES[column.form]) for column in self.wanted.columns])
        self.slices.begin(split, [name for name in into if name != "train"])
        blocks = _load_reader(self.wanted.data.source)(self.wanted, split, self.sources, self.slices)
        try:
            with ExitStack() as stack:
                writers = {name: stack.enter_context(ipc_writer(self.kept / name, schema)) for name in into}
                for cast in cast_blocks(blocks, self.wanted):
                    into[split].filtered += cast.filtered
                    block = without_faulty(cast.block, into[split], self.faults)
                    self._keep(block, into, cuts, writers)
                    self._report_progress(cast, share)
            self.statistics_by_split |= into
        except UserError as error:
            self.broken += error.problems
        self._before += share

    def _keep(
        self, block: Block, into: Mapping[str, SplitStatistics], cuts: Mapping[str, float], writers: Mapping[str, Any]
    ) -> None:
        hashes = hashes_of(block.rows, self.wanted.inputs)
        for name, mask in split_masks(hashes, cuts, next(iter(into))).items():
            part = block if mask is None else block.filter(mask)
            into[name].add(part)
            if (column := self.wanted.labels) and len(into[name].labels) > MAX_LABELS:
                message = (
                    f"column {column.source_name!r} has more than {MAX_LABELS} different values in the {name} "
                    "split: is it the column of labels?"
                )
                raise UserError([Problem(kind="data", where=column.field, message=message)])
            self.duplicate_texts.add(name, part, hashes if mask is None else hashes[mask])
            self.slices.add(name, part)
            writers[name].write(part.rows)

    def _report_progress(self, cast: CastBlock, share: float) -> None:
        self._rows += cast.block.rows.num_rows + len(cast.block.faults) + cast.filtered
        if done := self._before + share * cast.block.share:
            self.progress(self._rows, max(self._rows, round(self._rows / done)))

    def problems_and_labels(self) -> tuple[list[str], dict[str, int], list[Problem]]:
        """Returns the label names in order; the index of each label as rows spell it; and all problems, each once,
        without those of ignored checks."""
        found = [*self.broken, *self.faults.problems(self.wanted)]
        if any(problem.level == "error" for problem in found):
            for statistics in self.statistics_by_split.values():
                statistics.as_if_corrected()
        train = self.statistics_by_split.get("train")
        if train is None:
            return [], {}, _limit_problems(found)
        parts = [
            statistics
            for statistics in self.statistics_by_split.values()
            if statistics is train or statistics.held_out is not None
        ]
        seen = in_order({label for statistics in parts for label in statistics.labels})
        stored = train.named or self.wanted.task_type.label_order(seen) or ()
        try:
            names, places = label_places(self.wanted.data.label_names, stored, seen)
        except UserError as error:
            return [], {}, _limit_problems([*found, *error.problems])
        if (column := self.wanted.labels) and (misfit := self.wanted.task_type.incompatible_label(names)):
            label, why = misfit
            first = next((statistics.first[label] for statistics in parts if label in statistics.first), column.field)
            found.append(Problem(kind="data", where=first, message=f"label {label!r} {why}"))
        if level_of("unknown_label", self.wanted) != "error":
            for split, statistics in self.statistics_by_split.items():
                statistics.leave_out_unknown(places, _read_batches(self.kept / split))
        for statistics in self.statistics_by_split.values():
            for name, check in SPLIT_CHECKS.items():
                level = level_of(name, self.wanted)
                if level != "ignore":
                    found += [
                        Problem(kind="data", where=one.where, message=one.message, check=name, level=level)
                        for one in check(statistics, places, self.duplicate_texts)
                    ]
        return names, places, _limit_problems(found)


def _limit_problems(found: Iterable[Problem]) -> list[Problem]:
    """Returns each problem once, errors first, at most MAX_PROBLEMS."""
    once = sorted(dict.fromkeys(found), key=lambda problem: problem.level)
    if more := once[MAX_PROBLEMS:]:
        message = f"… and {len(more):,} more problems: fix these, and check again."
        once[MAX_PROBLEMS:] = [Problem(kind="data", where="data", message=message, level=more[0].level)]
    return once


def label_places(
    chosen: Sequence[str] | None, stored: Sequence[str], seen: Iterable[str]
) -> tuple[list[str], dict[str, int]]:
    """Returns the label names in order, and the index of each label as rows spell it.

    The order is that of the source if it defines its labels, else `in_order` of the labels in the training rows. The
    recipe's label names replace it: rows may spell these names, or whole numbers that count them from 0, or as many
    other whole numbers in increasing order. Raises UserError if numbers are none of these.
    """
    natural = list(stored) or in_order(seen)
    if chosen is None:
        return natural, {label: place for place, label in enumerate(natural)}
    names = list(chosen)
    if natural and all(map(_is_number, natural)) and not set(natural) <= set(names):
        numbers = sorted(natural, key=int)
        if "0" in numbers and all(0 <= int(label) < len(names) for label in numbers):
            return names, {str(place): place for place in range(len(names))}
        if len(numbers) == len(names):
            return names, {label: place for place, label in enumerate(numbers)}
        message = (
            f"{len(names)} names do not match the labels of train, {', '.join(numbers[:20])}: numbers count "
            "the names from 0, or there are as many of them. Write the names into the rows, or give more rows."
        )
        raise UserError([Problem(kind="data", where="data.label_names", message=message)])
    return names, {name: place for place, name in enumerate(names)}


def in_order(labels: Iterable[str]) -> list[str]:
    """Sorts labels: by value if all are whole numbers, else by spelling."""
    held = list(labels)
    return sorted(held, key=int if all(map(_is_number, held)) else str)


def _is_number(label: str) -> bool:
    """Whether it is the spelling of a whole number: `-1`, but not `01` or `1.0`."""
    digits = label.removeprefix("-")
    return label.isascii() and digits.isdecimal() and len(digits) < 20 and str(int(label)) == label


def _read_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Yields the rows that the first pass wrote."""
    with ipc_reader(file, mapped=False) as reader:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _place_labels(as_written: Path, final: Path, wanted: SourceColumns, places: Mapping[str, int]) -> Numbers:
    """Writes the rows with the index of each label. Returns the places of rows left out for an unknown label."""
    column = wanted.labels.name if wanted.labels else None
    types = {one.name: _CODED_TYPES.get(one.form, UNCODED_TYPES[one.form]) for one in wanted.columns}
    schema = pa.schema(list(types.items()))
    spelt, values = pa.array(list(places), pa.string()), pa.array(list(places.values()), pa.int64())
    removed = [np.zeros(0, np.int64)]
    done = 0

    def placed() -> Iterator[pa.RecordBatch]:
        nonlocal done
        for batch in _read_batches(as_written):
            rows = batch
            if column is not None:
                bad = has_unknown(batch.column(column), spelt)
                removed.append(done + np.flatnonzero(bad))
                rows = batch.filter(pa.array(~bad)) if bad.any() else batch
                labels = _label_indices(rows.column(column), spelt, values)
                rows = rows.set_column(rows.schema.names.index(column), column, labels)
            done += batch.num_rows
            yield pa.RecordBatch.from_arrays(rows.columns, schema=schema)

    with ipc_writer(final, schema) as writer:
        for block in in_blocks(placed(), schema):
            writer.write(block)
    return np.concatenate(removed)


_CODED_TYPES: Mapping[str, pa.DataType] = {"label": pa.int64(), "labels": pa.list_(pa.int64())}
"""The types of labels in the final files."""


def _label_indices(labels: pa.Array, spelt: pa.Array, places: pa.Array) -> pa.Array:
    """Returns the index of each label, all of which are known."""
    found = places.take(pc.index_in(flat_values(labels), value_set=spelt))
    return lists_like(labels, found) if is_list(labels.type) else found


def _rows_by_label(statistics: SplitStatistics, places: Mapping[str, int]) -> dict[int, int]:
    """Returns the rows (of lists: the entries) by the index of their label, without unknown labels."""
    counts: dict[int, int] = {}
    for label, count in statistics.labels.items():
        if label in places:
            counts[places[label]] = counts.get(places[label], 0) + count
    return counts


def _report(
    statistics_by_split: Mapping[str, SplitStatistics],
    names: Sequence[str],
    places: Mapping[str, int],
    problems: Sequence[Problem],
) -> dict[str, Any]:
    counts = {split: _rows_by_label(statistics, places) for split, statistics in statistics_by_split.items()}
    return {
        "rows": {split: statistics.rows for split, statistics in statistics_by_split.items()},
        "labels": {
            split: {name: known.get(place, 0) for place, name in enumerate(names)} for split, known in counts.items()
        },
        "characters": {
            split: statistics.characters.summary() | {"histogram": statistics.characters.histogram()}
            for split, statistics in statistics_by_split.items()
        },
        "held_out": {
            split: statistics.held_out
            for split, statistics in statistics_by_split.items()
            if statistics.held_out is not None
        },
        "left_out": {split: statistics.left_out for split, statistics in statistics_by_split.items()},
        "filtered": {split: statistics.filtered for split, statistics in statistics_by_split.items()},
        "problems": [problem.model_dump() for problem in problems],
    }


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
