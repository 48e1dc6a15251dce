"""load_data: rows of any source, checked, as Arrow files whose bytes depend on the rows alone.

The way of a row, here and in predictions (prediction_rows.py), from one file to the next:

    sources.py listing.py file_systems.py    the files of each split, or the user's object
    readers.py                               the interface of readers: blocks of rows, and the columns to read
    csv_files.py json_files.py conll_files.py parquet_and_arrow_files.py hub_datasets.py text_folders.py
    python_objects.py                        a reader each (training/recipe/tables/formats.py); decoding.py opens
                                             their files, row_dicts.py makes blocks of Python mappings
    casting.py                               the columns of the task type in its types, with arrow_columns.py;
                                             filtering.py: the rows that data.filter takes
    checks.py                                unusable rows are left out, each with its problem (row_problems.py)
    holdout.py row_groups.py row_times.py    the row's split: by its text, its group or its time
    corrections.py                           people's decisions about labels of train
    mixtures.py label_indices.py             its place in a mixture, the index of its label
    ipc_files.py                             the stored rows

Two passes. The first reads each source once, checks its rows, holds rows out, and stores all on disk with labels as
names. All labels are known then, so the second pass replaces each by its index. Memory: some blocks of rows, the
distinct labels and text lengths, and some bytes a row to find equal texts, groups and times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.data.casting import UNCODED_TYPES, CastBlock, cast_blocks
from training.data.checks import ROW_CHECKS, SET_CHECKS, SPLIT_CHECKS, RefusedRows, SplitProblem, usable_rows
from training.data.corrections import Corrections
from training.data.duplicates import DuplicateTexts, Hashes, hash_rows
from training.data.file_systems import display_name
from training.data.holdout import held_out_shares, split_masks
from training.data.hub_datasets import hub_splits
from training.data.ipc_files import (
    BLOCK_ROWS,
    IMAGES_IN_BLOCK,
    SPLITS,
    groups_file,
    ipc_writer,
    read_batches,
    write_table,
)
from training.data.label_indices import has_unknown, in_order, label_indices, label_places, whole_number
from training.data.leakage_checks import GROUP_CHECKS, SHARED_TEXT_CHECKS, SIGN_CHECKS
from training.data.mixtures import SetSize, describe_sets, mixed_counts, mixed_rows, passes
from training.data.near_duplicates import require_package
from training.data.readers import Block, MissingColumns, Numbers, load_reader
from training.data.row_groups import RowGroups, describe_groups
from training.data.row_problems import RowProblems, level_of
from training.data.row_statistics import SplitStatistics, joined, text_lengths, texts_of
from training.data.row_times import RowTimes, TimeCut, WaitingRows, format_time
from training.data.slice_columns import SliceColumns
from training.data.sources import object_splits
from training.data.split_signs import SplitSigns
from training.jobs.protocol import Result
from training.problems import Problem, UserError, user_code_errors
from training.recipe.data_fields import SHARED
from training.recipe.source_columns import SourceColumns
from training.recipe.tables.formats import FORMATS

if TYPE_CHECKING:
    from training.recipe import Data
    from training.recipe.column_types import RowSpecification

MAX_LABELS = 10_000  # a column with more distinct values probably holds no labels
MAX_PROBLEMS = 200

Progress = Callable[[int, int], None]
Explain = Callable[[int], AbstractContextManager[None]]
CountTokens = Callable[[list[str]], int]


class LoadDataResult(Result):
    """Numbers of rows, labels and warnings."""

    train_rows: int | None = None
    """None if there is no such split."""
    validation_rows: int | None = None
    test_rows: int | None = None
    labels: int
    warnings: int

    @property
    def rows(self) -> dict[str, int]:
        """By split."""
        found = {"train": self.train_rows, "validation": self.validation_rows, "test": self.test_rows}
        return {split: number for split, number in found.items() if number is not None}


def load(
    data: Data,
    task_type: RowSpecification,
    sources: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    out: Path,
    progress: Progress = lambda done, total: None,
    evaluated: Sequence[str] = (),
    explain: Explain = lambda index: nullcontext(),
    count_tokens: CountTokens | None = None,
    *,
    only: str | None = None,
    spelt: Mapping[str, int] | None = None,
    corrections: str | None = None,
    refused_rows: RefusedRows | None = None,
    image_folders: Sequence[str | None] = (),
) -> LoadDataResult:
    """Writes the rows of every split to the folder `out`, with their labels and a report.

    `sources` is the lock of the rows: the files of each split (`{"train": ["/data/train.csv"]}`), the commit of a
    Hub data set (`{"commit": "<40 hex digits>"}`), or nothing for an object; for a mixture one of these for each set.
    `progress` gets the rows read and an estimate of all. `evaluated` are the splits that the recipe evaluates, which a
    Hub data set and a callable have to provide. `explain` gives the context in which a set is read, by its number: it
    may raise UserError in place of other errors. `count_tokens` returns the tokens of texts; a mixture that is weighted
    by tokens needs it. `only` is the one split to read, whole, if nothing is trained; `spelt` are then the indices of
    labels whose spelling in the training rows is not their name, as the report has them. `corrections` is the file of
    decisions about labels. Rows that `refused_rows` finds are left out. `image_folders` are those from which the paths
    of images in each set start; other sets must hold the images themselves.

    `out` gets `<split>.arrow` with the task type's columns, in the types of RowSpecification.columns;
    `labels.json` (names in order, none for a task type without labels); `log/report.json` (rows, labels, characters
    and warnings a split). For validation and test it gets `<split>.slices.arrow`, row for row with `<split>.arrow`:
    every other column that can group rows, under the recipe's name, as dictionary<int32, string> (whole
    numbers and truths as `3` and `true`, those of a ClassLabel by their names; null for a missing value and for an
    empty text), if there is any; in a mixture also the column `dataset` with the set's name. And `slices.json`: the
    names of those `kept`, and of those `left_out` with the reason. If data.split names groups, it gets
    `<split>.groups.arrow`, a hash of the group of each row; for train except in a mixture.

    The train split of a mixture has its rows in the order of `mixed_rows`, and the report has the table of its sets.
    Raises UserError with every problem of all splits; the contents of `out` are invalid then.
    """
    out.mkdir(parents=True, exist_ok=True)
    given = [sources] if isinstance(sources, Mapping) else list(sources)
    folders = image_folders or [None] * len(given)
    wanted = [
        SourceColumns(one, task_type, tuple(evaluated), folder) for one, folder in zip(data.sets, folders, strict=True)
    ]
    if level_of("near_duplicates", wanted[0]) != "ignore" and not task_type.reads_images():
        require_package()
    with user_code_errors(task_type), TemporaryDirectory(dir=out, prefix=".as-written-") as folder:
        decided = Corrections.read(corrections, wanted[0]) if corrections else None
        rest = (spelt or {}, decided, refused_rows)
        reading = _Reading(data, wanted, given, Path(folder), progress, explain, only, *rest)
        reading.read_all()
        names, places, problems = reading.problems_and_labels()
        _require(problems)
        table: list[dict[str, Any]] = []
        for split in [*reading.statistics_by_split]:
            rows = read_batches(Path(folder, split), mapped=False)
            if split == "train" and data.mix is not None:
                rows, table = reading.mix(places, count_tokens)
            removed = _place_labels(rows, out / f"{split}.arrow", reading.wanted, places)
            reading.slices.write(split, out / f"{split}.slices.arrow", removed)
            if split != "train" or data.mix is None:
                reading.groups.write(split, out / groups_file(split), removed)
        if table:
            problems = _limit_problems([*problems, *reading.problems_of_mixture(places, problems)])
            _require(problems)
    report = _report(reading.statistics_by_split, names, places, problems)
    report |= reading.describe_splits() | ({"corrections": decided.report(places)} if decided else {})
    _write_json(out / "labels.json", names)
    _write_json(out / "slices.json", reading.slices.summary())
    _write_json(out / "log" / "report.json", report | ({"mixture": table} if table else {}))
    rows_of = {f"{split}_rows": statistics.rows for split, statistics in reading.statistics_by_split.items()}
    return LoadDataResult(**rows_of, labels=len(names), warnings=len(problems))


def _require(problems: Iterable[Problem]) -> None:
    """Raises UserError with all problems if one is an error."""
    found = list(problems)
    if any(problem.level == "error" for problem in found):
        raise UserError(found)


def _split_shares(wanted: SourceColumns, sources: Mapping[str, Any], needed: str) -> dict[str, float]:
    """Returns the splits to read, in order, each with its share of the bytes to read."""
    data = wanted.data
    if data.source == "hub":
        existing: Iterable[str] = hub_splits(wanted, sources)
    else:
        existing = object_splits(data, wanted.evaluated) if data.source == "python" else sources
    splits = [split for split in SPLITS if split in existing]
    if needed not in splits:
        message = f"there are no rows for train: {data.path} has {', '.join(existing)}. Name them in data.splits.train."
        raise UserError.of("data", "data.splits.train", message)
    sizes = {split: sum(_size_of(file) for file in sources[split]) if split in sources else 1 for split in splits}
    return {split: size / (sum(sizes.values()) or 1) for split, size in sizes.items()}


def _size_of(file: str) -> int:
    path = Path(file)
    return path.stat().st_size if path.is_file() else 1


@dataclass
class _Reading:
    """The first pass over all sources: one, or those of the sets of a mixture."""

    data: Data
    sets: Sequence[SourceColumns]
    sources: Sequence[Mapping[str, Any]]
    folder: Path
    """The folder with the rows of each split, labels as names. In a mixture the sets follow each other."""
    progress: Progress
    explain: Explain
    only: str | None = None
    """The one split to read, if nothing is trained."""
    spelt: Mapping[str, int] = field(default_factory=dict)
    """The indices of labels whose spelling is not their name."""
    corrections: Corrections | None = None
    refused_rows: RefusedRows | None = None
    statistics_by_split: dict[str, SplitStatistics] = field(default_factory=dict)
    source_problems: list[Problem] = field(default_factory=list)
    """Problems of sources that could not be read completely."""

    def __post_init__(self) -> None:
        first = self.sets[0]
        self.wanted = first if self.data.mix is None else replace(first, data=self._about_all_sets(first.data))
        self.names = self.data.set_names or [""]
        self.row_problems = [RowProblems() for _ in self.sets]
        self.duplicate_texts = DuplicateTexts(self.wanted, self.folder)
        self.slices = SliceColumns(self.wanted, self.folder)
        self._open_files = ExitStack()
        self.groups = RowGroups(self.folder / "groups", self._open_files)
        self._has_groups = any(one.data.split is not None and one.data.split.by == "group" for one in self.sets)
        self.signs = {index: SplitSigns() for index, wanted in enumerate(self.sets) if wanted.split_column is None}
        """Of the sets whose rows are held out by chance."""
        self._parts: list[tuple[int, SplitStatistics]] = []
        self._batches: dict[str, list[int]] = {}
        """The set of each batch that was written, by split."""
        self._writers: dict[str, Any] = {}
        self._rows_read, self._share_read = 0, 0.0

    def _about_all_sets(self, first: Data) -> Data:
        return first.model_copy(update={name: getattr(self.data, name) for name in SHARED})

    def read_all(self) -> None:
        """Reads every split of every set, checks its rows, holds rows out, and stores them all."""
        with self._open_files:
            for index, wanted in enumerate(self.sets):
                try:
                    with self.explain(index):
                        splits = _split_shares(wanted, self.sources[index], self.only or "train")
                        for split, share in splits.items():
                            held_out = held_out_shares(wanted.data, splits) if split == "train" else {}
                            self._read(index, split, share / len(self.sets), held_out)
                except UserError as error:
                    self.source_problems += self.data.locate(error.problems, index)

    def _read(self, index: int, split: str, share: float, held_out: Mapping[str, float]) -> None:
        wanted = self.sets[index]
        statistics_of = {split: SplitStatistics(split, wanted)}
        statistics_of |= {other: SplitStatistics(other, wanted, size) for other, size in held_out.items()}
        self.slices.begin(split, [name for name in statistics_of if name != "train"], wanted, self.names[index])
        by_time = wanted.data.split is not None and wanted.data.split.by == "time"
        times = RowTimes(wanted) if by_time else None
        waiting = WaitingRows(self.folder / "waiting") if times is not None and held_out else None
        blocks = load_reader(wanted.data.source)(wanted, split, self.sources[index], self.slices)
        with_rows = set[str]()
        try:
            for name in statistics_of:
                self._open(name)
            for cast in cast_blocks(self._named(blocks, index), wanted):
                if cast.filtered or cast.block.row_problems or cast.block.rows.num_rows:
                    with_rows.add(cast.block.where)
                statistics_of[split].filtered += cast.filtered
                problems = self.row_problems[index]
                block = usable_rows(cast.block, statistics_of[split], problems, times, self.refused_rows)
                if waiting is not None:
                    waiting.add(block)
                else:
                    self._keep(index, block, statistics_of, held_out, times)
                self._report_progress(cast, share)
            if waiting is not None and times is not None:
                all_times = np.concatenate([*waiting.times, np.zeros(0)])
                cut = TimeCut.of(all_times, times.kind, wanted.data, held_out)
                for block in waiting.blocks():
                    self._keep(index, block, statistics_of, held_out, times, cut)
                for name, part in statistics_of.items():
                    part.held_out = None if name == split else part.rows / max(1, len(all_times))
                statistics_of[split].in_gap = len(all_times) - sum(
                    part.rows + part.dropped for part in statistics_of.values()
                )
            if wanted.data.source in FORMATS and wanted.data.limit is None:
                names = map(display_name, self.sources[index][split])
                files = [f"{self.names[index]}: {name}" if self.names[index] else name for name in names]
                statistics_of[split].without_rows += [file for file in files if file not in with_rows]
            self._parts += [(index, statistics) for statistics in statistics_of.values()]
        except UserError as error:
            if isinstance(error, MissingColumns):
                self.row_problems[index].forget(error.files, (*ROW_CHECKS, "missing_group", "missing_time"))
            self.source_problems += self.data.locate(error.problems, index)
        self._share_read += share

    def _open(self, split: str) -> None:
        if split not in self._writers:
            schema = pa.schema([(column.name, UNCODED_TYPES[column.form]) for column in self.wanted.columns])
            self._writers[split] = self._open_files.enter_context(ipc_writer(self.folder / split, schema))
            self._batches[split] = []

    def _named(self, blocks: Iterator[Block], index: int) -> Iterator[Block]:
        """Yields the blocks with the set's name in the places that messages show."""
        name = self.names[index]
        return (replace(block, where=f"{name}: {block.where}") for block in blocks) if name else blocks

    def _keep(
        self,
        index: int,
        block: Block,
        statistics_of: Mapping[str, SplitStatistics],
        held_out: Mapping[str, float],
        times: RowTimes | None,
        cut: TimeCut | None = None,
    ) -> None:
        """Stores the rows of a block in their splits: by the cut, or by the hashes of their texts or groups."""
        hashes = drawn = hash_rows(block.rows, self.wanted.inputs)
        wanted = self.sets[index]
        by_group = wanted.split_column is not None and times is None
        if by_group:
            block, drawn = self.groups.draw(block, wanted, hashes, self.row_problems[index])
        masks = split_masks(drawn, held_out, next(iter(statistics_of))) if cut is None else cut.masks(block)
        if (trained := masks.get("train")) is not None and index in self.signs:
            self.signs[index].add_block(block, wanted, ~trained)
        for name, mask in masks.items():
            part = block if mask is None else block.filter(mask)
            part_hashes, part_drawn = (one if mask is None else one[mask] for one in (hashes, drawn))
            if self.corrections is not None:
                part, kept = self.corrections.apply(name, part, part_hashes)
                part_hashes, part_drawn = part_hashes[kept], part_drawn[kept]
                statistics_of[name].dropped += int((~kept).sum())
            statistics_of[name].add(part)
            if (column := wanted.labels) and len(statistics_of[name].labels) > MAX_LABELS:
                message = (
                    f"column {column.source_name!r} has more than {MAX_LABELS} different values in the {name} "
                    "split: is it the column of labels?"
                )
                raise UserError.of("data", column.field, message)
            self.duplicate_texts.add(name, part, part_hashes)
            if times is not None and times.kind is not None:
                statistics_of[name].add_times(part.split_values.to_numpy(zero_copy_only=False), times.kind)
            if by_group:
                self.groups.add_block(name, part, part_drawn)
            elif self._has_groups:
                self.groups.add_drawn(name, part_hashes)
            self.slices.add(name, part)
            self._writers[name].write(part.rows)
            self._batches[name].append(index)

    def _report_progress(self, cast: CastBlock, share: float) -> None:
        self._rows_read += cast.block.rows.num_rows + len(cast.block.row_problems) + cast.filtered
        if done := self._share_read + share * cast.block.share:
            self.progress(self._rows_read, max(self._rows_read, round(self._rows_read / done)))

    def problems_and_labels(self) -> tuple[list[str], dict[str, int], list[Problem]]:
        """Returns the label names in order; the index of each label as rows spell it; and all problems, each once,
        without problems of ignored checks."""
        problems = [*self.source_problems, *(self.corrections.problems if self.corrections else ())]
        for index, wanted in enumerate(self.sets):
            problems += self.data.locate(self.row_problems[index].problems(wanted), index)
        parts = [statistics for _, statistics in self._parts]
        if any(problem.level == "error" for problem in problems):
            for statistics in parts:
                statistics.as_if_corrected()
        by_split = {split: [part for part in parts if part.split == split] for split in SPLITS}
        self.statistics_by_split = {split: joined(found, self.wanted) for split, found in by_split.items() if found}
        train = self.statistics_by_split.get(self.only or "train")
        if train is None:
            return [], {}, _limit_problems(problems)
        trained = [part for part in parts if part.split == (self.only or "train") or part.held_out is not None]
        seen = in_order({label for statistics in trained for label in statistics.labels})
        stored = train.named or self.wanted.task_type.label_order(seen) or ()
        others = {label for statistics in parts for label in statistics.labels}
        try:
            if self.spelt and self.data.label_names:
                names = list(self.data.label_names)
                places = {name: place for place, name in enumerate(names)} | dict(self.spelt)
                numbers = {label: whole_number(label) for label in seen if label not in places}
                places |= {label: places[number] for label, number in numbers.items() if number in places}
            else:
                corrected = self.corrections
                spelt = corrected.of_source(seen) if corrected else seen
                names, places = label_places(self.data.label_names, stored, spelt, others)
                if corrected is not None:
                    places = corrected.with_names(names, places)
                    problems += corrected.problems
        except UserError as error:
            return [], {}, _limit_problems([*problems, *error.problems])
        if (column := self.wanted.labels) and (misfit := self.wanted.task_type.incompatible_label(names)):
            label, reason = misfit
            first = next((statistics.first[label] for statistics in trained if label in statistics.first), column.field)
            problems.append(Problem(kind="data", where=first, message=f"label {label!r} {reason}"))
        if level_of("unknown_label", self.wanted) != "error":
            for split, statistics in self.statistics_by_split.items():
                statistics.leave_out_unknown(places, read_batches(self.folder / split, mapped=False))
        for statistics in self.statistics_by_split.values():
            for name, check in (*SPLIT_CHECKS.items(), *SHARED_TEXT_CHECKS.items()):
                problems += self._found(name, check(statistics, places, self.duplicate_texts))
        if self.corrections is not None:
            remarks = [SplitProblem("data.corrections", remark) for remark in self.corrections.remarks(places)]
            problems += self._found("unmatched_corrections", remarks)
        for index, signs in self.signs.items():
            for name, look in SIGN_CHECKS.items():
                problems += self.data.locate(self._found(name, look(signs)), index)
        for name, find in GROUP_CHECKS.items():
            problems += self._found(name, find(self.groups, self.wanted))
        for name, compare in SET_CHECKS.items():
            problems += self._found(name, compare(self._labels_by_set(), self.names))
        return names, places, _limit_problems(problems)

    def _found(self, check: str, found: Iterable[SplitProblem]) -> list[Problem]:
        """Returns what a check found as problems; none if it is ignored."""
        level = level_of(check, self.wanted)
        if level == "ignore":  # nothing is searched then: the check itself takes time
            return []
        return [Problem(kind="data", where=one.where, message=one.message, check=check, level=level) for one in found]

    def describe_splits(self) -> dict[str, Any]:
        """Returns the groups or times of each split for the report, if the recipe names a column for them."""
        chosen = {one.data.split.by for one in self.sets if one.data.split is not None}
        found: dict[str, Any] = {}
        if "group" in chosen:
            found |= describe_groups(self.groups, list(self.statistics_by_split))
        if "time" in chosen:
            spans = {split: one.times for split, one in self.statistics_by_split.items() if one.times is not None}
            found["times"] = {
                split: [format_time(first, kind), format_time(last, kind)]
                for split, (first, last, kind) in spans.items()
            }
            found["in_gap"] = {split: one.in_gap for split, one in self.statistics_by_split.items()}
        return {"split": found} if found else {}

    def _labels_by_set(self) -> list[set[str]]:
        """Returns the labels in the train rows of each set, held-out rows included."""
        found = [set[str]() for _ in self.sets]
        for index, part in self._parts:
            if part.split == "train" or part.held_out is not None:
                found[index] |= part.labels.keys()
        return found

    def mix(
        self, places: Mapping[str, int], count_tokens: CountTokens | None
    ) -> tuple[Iterator[pa.RecordBatch], list[dict[str, Any]]]:
        """Returns the train rows of the mixture, labels as names, and the table of its sets: for each its name, rows,
        weight, and the rows, passes and share of the mixture. The statistics of train become those of the mixture while
        the rows are read. Raises UserError for a set without rows in it."""
        file, sets = self.folder / "train", range(len(self.sets))

        def rows_of(index: int) -> Iterator[pa.RecordBatch]:
            numbers = [number for number, of_set in enumerate(self._batches["train"]) if of_set == index]
            return self._known(read_batches(file, numbers, mapped=False), places)

        def hashes_of(index: int) -> Hashes:
            return np.concatenate([hash_rows(batch, self.wanted.inputs) for batch in rows_of(index)])

        sizes = []
        for index in sets:
            rows = characters = tokens = 0
            for batch in rows_of(index):
                rows += batch.num_rows
                characters += int(text_lengths(batch, self.wanted.contents).sum())
                tokens += count_tokens(list(texts_of(batch, self.wanted.contents))) if count_tokens else 0
            sizes.append(SetSize(self.names[index], rows, characters, tokens if count_tokens else None))
        counts, seed = mixed_counts(self.data, sizes), self.data.mix_seed
        streams = [
            passes(partial(rows_of, index), sizes[index].rows, counts[index], partial(hashes_of, index), seed)
            for index in sets
        ]
        schema = pa.schema([(column.name, UNCODED_TYPES[column.form]) for column in self.wanted.columns])
        table = describe_sets(self.data, sizes, counts, [self._evaluated_rows(index) for index in sets])
        return self._counted(mixed_rows(streams, counts, schema)), table

    def _known(self, batches: Iterator[pa.RecordBatch], places: Mapping[str, int]) -> Iterator[pa.RecordBatch]:
        """Yields the rows without unknown labels."""
        spelt = pa.array(list(places), pa.string())
        for batch in batches:
            if self.wanted.labels is None:
                yield batch
            else:
                yield batch.filter(pa.array(~has_unknown(batch.column(self.wanted.labels.name), spelt)))

    def _counted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        before = self.statistics_by_split["train"]
        mixed = SplitStatistics("train", self.wanted, named=before.named)
        mixed.filtered, mixed.left_out = before.filtered, before.left_out
        self.statistics_by_split["train"] = mixed
        for batch in batches:
            mixed.add(Block("the mixture", batch, np.arange(mixed.rows + 1, mixed.rows + 1 + batch.num_rows)))
            yield batch

    def _evaluated_rows(self, index: int) -> dict[str, int]:
        """Returns the rows of a set in the splits other than train."""
        return {part.split: part.rows for number, part in self._parts if number == index and part.split != "train"}

    def problems_of_mixture(self, places: Mapping[str, int], known: Sequence[Problem]) -> list[Problem]:
        """Returns problems of the mixture's train rows that the sets do not have, such as a label that only rows have
        which are not in it."""
        train, before = self.statistics_by_split["train"], {(problem.check, problem.where) for problem in known}
        return [
            problem
            for name in ("single_label", "absent_label")
            for problem in self._found(name, SPLIT_CHECKS[name](train, places, self.duplicate_texts))
            if (problem.check, problem.where) not in before
        ]


def _limit_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Returns each problem once, errors first, at most MAX_PROBLEMS."""
    distinct = sorted(dict.fromkeys(problems), key=lambda problem: problem.level)
    if omitted := distinct[MAX_PROBLEMS:]:
        message = f"… and {len(omitted):,} more problems: fix these, and check again."
        distinct[MAX_PROBLEMS:] = [Problem(kind="data", where="data", message=message, level=omitted[0].level)]
    return distinct


def _place_labels(
    as_written: Iterable[pa.RecordBatch], final: Path, wanted: SourceColumns, places: Mapping[str, int]
) -> Numbers:
    """Writes the rows with labels as indices. Returns the positions of rows left out for an unknown label."""
    column = wanted.labels.name if wanted.labels else None
    types = {stored.name: _CODED_TYPES.get(stored.form, UNCODED_TYPES[stored.form]) for stored in wanted.columns}
    schema = pa.schema(list(types.items()))
    spelt, values = pa.array(list(places), pa.string()), pa.array(list(places.values()), pa.int64())
    removed = [np.zeros(0, np.int64)]
    done = 0

    def coded_batches() -> Iterator[pa.RecordBatch]:
        nonlocal done
        for batch in as_written:
            rows = batch
            if column is not None:
                is_unknown = has_unknown(batch.column(column), spelt)
                removed.append(done + np.flatnonzero(is_unknown))
                rows = batch.filter(pa.array(~is_unknown)) if is_unknown.any() else batch
                labels = label_indices(rows.column(column), spelt, values)
                rows = rows.set_column(rows.schema.names.index(column), column, labels)
            done += batch.num_rows
            yield pa.RecordBatch.from_arrays(rows.columns, schema=schema)

    write_table(final, coded_batches(), schema, IMAGES_IN_BLOCK if wanted.has_images else BLOCK_ROWS)
    return np.concatenate(removed)


_CODED_TYPES: Mapping[str, pa.DataType] = {"label": pa.int64(), "labels": pa.list_(pa.int64())}
"""The types of labels in the final files."""


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
    } | ({"spelt": dict(places)} if list(places) != list(names) else {})


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
