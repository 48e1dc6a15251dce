"""load_data: rows of any source, checked, as Arrow files whose bytes depend on the rows alone.

Two passes. The first reads each source once, checks its rows, holds rows out, and stores all on disk with labels as
names. All labels are known then, so the second pass replaces each by its index. Memory: some blocks
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
from training.data.duplicates import DuplicateTexts, hash_rows
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

MAX_LABELS = 10_000  # a column with more distinct values probably holds no labels
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
    with user_code_errors(task_type), TemporaryDirectory(dir=out, prefix=".as-written-") as folder:
        reading = _Reading(wanted, sources, Path(folder), progress)
        reading.read_all()
        names, places, problems = reading.problems_and_labels()
        if any(problem.level == "error" for problem in problems):
            raise UserError(problems)
        statistics_by_split = reading.statistics_by_split
        for split in statistics_by_split:
            removed = _place_labels(Path(folder, split), out / f"{split}.arrow", wanted, places)
            reading.slices.write(split, out / f"{split}.slices.arrow", removed)
    _write_json(out / "labels.json", names)
    _write_json(out / "slices.json", reading.slices.summary())
    _write_json(out / "log" / "report.json", _report(statistics_by_split, names, places, problems))
    rows = {f"{split}_rows": statistics.rows for split, statistics in statistics_by_split.items()}
    return rows | {"labels": len(names), "warnings": len(problems)}


def _split_shares(wanted: SourceColumns, sources: Mapping[str, Any]) -> dict[str, float]:
    """Returns the splits to read, in order, each with its share of the bytes to read."""
    data = wanted.data
    if data.source == "hub":
        existing: Iterable[str] = hub_splits(wanted, sources)
    else:
        existing = object_splits(data, wanted.evaluated) if data.source == "python" else sources
    splits = [split for split in SPLITS if split in existing]
    if "train" not in splits:
        message = f"there are no rows for train: {data.path} has {', '.join(existing)}. Name them in data.splits.train."
        raise UserError([Problem(kind="data", where="data.splits.train", message=message)])
    sizes = {split: sum(_size_of(file) for file in sources[split]) if split in sources else 1 for split in splits}
    return {split: size / (sum(sizes.values()) or 1) for split, size in sizes.items()}


def _load_reader(source: str) -> Reader:
    module, _, name = SOURCES[source].reader.partition(":")
    reader: Reader = getattr(import_module(module), name)
    return reader


def _size_of(file: str) -> int:
    path = Path(file)
    return path.stat().st_size if path.is_file() else 1


@dataclass
class _Reading:
    """The first pass over all sources."""

    wanted: SourceColumns
    sources: Mapping[str, Any]
    folder: Path
    """The folder with the rows of each split, labels as names."""
    progress: Progress
    statistics_by_split: dict[str, SplitStatistics] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    source_problems: list[Problem] = field(default_factory=list)
    """Problems of sources that could not be read completely."""

    def __post_init__(self) -> None:
        self.duplicate_texts = DuplicateTexts(self.wanted, self.folder)
        self.slices = SliceColumns(self.wanted, self.folder)
        self._rows_read, self._share_read = 0, 0.0

    def read_all(self) -> None:
        """Reads every split, checks its rows, holds rows out, and stores them all."""
        try:
            splits = _split_shares(self.wanted, self.sources)
        except UserError as error:
            self.source_problems += error.problems
            return
        for split, share in splits.items():
            self._read(split, share, held_out_shares(self.wanted.data, splits) if split == "train" else {})
        self.statistics_by_split = {
            split: self.statistics_by_split[split] for split in SPLITS if split in self.statistics_by_split
        }

    def _read(self, split: str, share: float, held_out: Mapping[str, float]) -> None:
        statistics_of = {split: SplitStatistics(split, self.wanted)}
        statistics_of |= {other: SplitStatistics(other, self.wanted, size) for other, size in held_out.items()}
        schema = pa.schema([(column.name, UNCODED_TYPES[column.form]) for column in self.wanted.columns])
        self.slices.begin(split, [name for name in statistics_of if name != "train"])
        blocks = _load_reader(self.wanted.data.source)(self.wanted, split, self.sources, self.slices)
        try:
            with ExitStack() as stack:
                writers = {name: stack.enter_context(ipc_writer(self.folder / name, schema)) for name in statistics_of}
                for cast in cast_blocks(blocks, self.wanted):
                    statistics_of[split].filtered += cast.filtered
                    block = without_faulty(cast.block, statistics_of[split], self.faults)
                    self._keep(block, statistics_of, held_out, writers)
                    self._report_progress(cast, share)
            self.statistics_by_split |= statistics_of
        except UserError as error:
            self.source_problems += error.problems
        self._share_read += share

    def _keep(
        self,
        block: Block,
        statistics_of: Mapping[str, SplitStatistics],
        held_out: Mapping[str, float],
        writers: Mapping[str, Any],
    ) -> None:
        hashes = hash_rows(block.rows, self.wanted.inputs)
        for name, mask in split_masks(hashes, held_out, next(iter(statistics_of))).items():
            part = block if mask is None else block.filter(mask)
            statistics_of[name].add(part)
            if (column := self.wanted.labels) and len(statistics_of[name].labels) > MAX_LABELS:
                message = (
                    f"column {column.source_name!r} has more than {MAX_LABELS} different values in the {name} "
                    "split: is it the column of labels?"
                )
                raise UserError([Problem(kind="data", where=column.field, message=message)])
            self.duplicate_texts.add(name, part, hashes if mask is None else hashes[mask])
            self.slices.add(name, part)
            writers[name].write(part.rows)

    def _report_progress(self, cast: CastBlock, share: float) -> None:
        self._rows_read += cast.block.rows.num_rows + len(cast.block.faults) + cast.filtered
        if done := self._share_read + share * cast.block.share:
            self.progress(self._rows_read, max(self._rows_read, round(self._rows_read / done)))

    def problems_and_labels(self) -> tuple[list[str], dict[str, int], list[Problem]]:
        """Returns the label names in order; the index of each label as rows spell it; and all problems, each once,
        without problems of ignored checks."""
        problems = [*self.source_problems, *self.faults.problems(self.wanted)]
        if any(problem.level == "error" for problem in problems):
            for statistics in self.statistics_by_split.values():
                statistics.as_if_corrected()
        train = self.statistics_by_split.get("train")
        if train is None:
            return [], {}, _limit_problems(problems)
        trained = [
            statistics
            for statistics in self.statistics_by_split.values()
            if statistics is train or statistics.held_out is not None
        ]
        seen = in_order({label for statistics in trained for label in statistics.labels})
        stored = train.named or self.wanted.task_type.label_order(seen) or ()
        try:
            names, places = label_places(self.wanted.data.label_names, stored, seen)
        except UserError as error:
            return [], {}, _limit_problems([*problems, *error.problems])
        if (column := self.wanted.labels) and (misfit := self.wanted.task_type.incompatible_label(names)):
            label, reason = misfit
            first = next((statistics.first[label] for statistics in trained if label in statistics.first), column.field)
            problems.append(Problem(kind="data", where=first, message=f"label {label!r} {reason}"))
        if level_of("unknown_label", self.wanted) != "error":
            for split, statistics in self.statistics_by_split.items():
                statistics.leave_out_unknown(places, _read_batches(self.folder / split))
        for statistics in self.statistics_by_split.values():
            for name, check in SPLIT_CHECKS.items():
                level = level_of(name, self.wanted)
                if level != "ignore":
                    problems += [
                        Problem(kind="data", where=finding.where, message=finding.message, check=name, level=level)
                        for finding in check(statistics, places, self.duplicate_texts)
                    ]
        return names, places, _limit_problems(problems)


def _limit_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Returns each problem once, errors first, at most MAX_PROBLEMS."""
    distinct = sorted(dict.fromkeys(problems), key=lambda problem: problem.level)
    if omitted := distinct[MAX_PROBLEMS:]:
        message = f"… and {len(omitted):,} more problems: fix these, and check again."
        distinct[MAX_PROBLEMS:] = [Problem(kind="data", where="data", message=message, level=omitted[0].level)]
    return distinct


def label_places(
    chosen: Sequence[str] | None, stored: Sequence[str], seen: Iterable[str]
) -> tuple[list[str], dict[str, int]]:
    """Returns the label names in order, and the index of each label as rows spell it.

    The order is the source's own if it defines its labels, else `in_order` of the labels in the training rows. The
    recipe's label names replace it. Rows may then spell these names, or count them by whole numbers from 0, or have as
    many other whole numbers, which are matched in increasing order. Raises UserError for any other numbers.
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
    distinct = list(labels)
    return sorted(distinct, key=int if all(map(_is_number, distinct)) else str)


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
    """Writes the rows with labels as indices. Returns the positions of rows left out for an unknown label."""
    column = wanted.labels.name if wanted.labels else None
    types = {stored.name: _CODED_TYPES.get(stored.form, UNCODED_TYPES[stored.form]) for stored in wanted.columns}
    schema = pa.schema(list(types.items()))
    spelt, values = pa.array(list(places), pa.string()), pa.array(list(places.values()), pa.int64())
    removed = [np.zeros(0, np.int64)]
    done = 0

    def coded_batches() -> Iterator[pa.RecordBatch]:
        nonlocal done
        for batch in _read_batches(as_written):
            rows = batch
            if column is not None:
                is_unknown = has_unknown(batch.column(column), spelt)
                removed.append(done + np.flatnonzero(is_unknown))
                rows = batch.filter(pa.array(~is_unknown)) if is_unknown.any() else batch
                labels = _label_indices(rows.column(column), spelt, values)
                rows = rows.set_column(rows.schema.names.index(column), column, labels)
            done += batch.num_rows
            yield pa.RecordBatch.from_arrays(rows.columns, schema=schema)

    with ipc_writer(final, schema) as writer:
        for block in in_blocks(coded_batches(), schema):
            writer.write(block)
    return np.concatenate(removed)


_CODED_TYPES: Mapping[str, pa.DataType] = {"label": pa.int64(), "labels": pa.list_(pa.int64())}
"""The types of labels in the final files."""


def _label_indices(labels: pa.Array, spelt: pa.Array, places: pa.Array) -> pa.Array:
    """Returns the index of each label; every label has one."""
    indices = places.take(pc.index_in(flat_values(labels), value_set=spelt))
    return lists_like(labels, indices) if is_list(labels.type) else indices


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
            split: {name: rows_of.get(place, 0) for place, name in enumerate(names)}
            for split, rows_of in counts.items()
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
