"""Rows of any source, checked, as Arrow files that say the same for the same rows.

Two passes: the first reads each source once, checks its rows, cuts off what is held out, and keeps them on disk as
they are written; only then are all labels known, and the second turns each into its place among the label names.
Memory holds some blocks of rows, the distinct labels and text lengths, and some bytes a row to find equal texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.ipc import in_blocks, ipc_reader, ipc_writer
from training.problems import Problem, UserError
from training.rows.blocks import SPLITS, Block, Numbers, columns
from training.rows.checks import SPLIT_CHECKS, level_of
from training.rows.holdout import cut, held_out
from training.rows.hub import hub_splits
from training.rows.objects import object_splits
from training.rows.reading import READERS
from training.rows.shaping import Shaped, shaped
from training.rows.slices import Slices
from training.rows.survey import Faults, Survey, without_faulty
from training.rows.twins import Twins, hashes_of

if TYPE_CHECKING:
    from training.recipe import Data

MOST_LABELS = 10_000  # more distinct values than this are no labels but, most likely, the wrong column
MOST_PROBLEMS = 200

Progress = Callable[[int, int], None]


def load(
    data: Data, sources: Mapping[str, Any], out: Path, progress: Progress = lambda done, total: None
) -> dict[str, int]:
    """Writes the rows of every split to the folder `out`, with their labels and a report; gives the rows a
    split, the number of labels and of warnings.

    `sources` is what was pinned: the files of each split (`{"train": ["/data/train.csv"]}`), the commit of a
    Hub data set (`{"commit": "<40 hex digits>"}`), or nothing for an object. `progress` gets the rows read and an
    estimate of all.

    `out` gets `<split>.arrow` with columns `text`, for pairs `text_pair`, and `label` (int64, a place in
    `labels.json`); `labels.json` (names in order); `log/report.json` (rows, labels, characters and warnings a split).
    For validation and test it gets `<split>.slices.arrow`, row for row with `<split>.arrow`: every other column by
    which rows can be told apart, under the recipe's name, as dictionary<int32, string> (whole numbers and truths as
    `3` and `true`, those of a ClassLabel by their names; null for a missing value and for an empty text); no such file
    where there is no such column. And `slices.json`: the names of those `kept`, and of those `left_out` with the
    reason.
    Raises UserError with every problem of all splits; what `out` holds then is of no use.
    """
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out, prefix=".as-written-") as kept:
        reading = _Reading(data, sources, Path(kept), progress)
        reading.read_all()
        names, places, problems = reading.judged()
        if any(problem.level == "error" for problem in problems):
            raise UserError(problems)
        surveys = reading.surveys
        for split in surveys:
            gone = _place_labels(Path(kept, split), out / f"{split}.arrow", places)
            reading.slices.write(split, out / f"{split}.slices.arrow", gone)
    _write_json(out / "labels.json", names)
    _write_json(out / "slices.json", reading.slices.summary())
    _write_json(out / "log" / "report.json", _report(data, surveys, names, places, problems))
    rows = {f"{split}_rows": sum(_known(survey, places).values()) for split, survey in surveys.items()}
    return rows | {"labels": len(names), "warnings": len(problems)}


def _splits(data: Data, sources: Mapping[str, Any]) -> dict[str, float]:
    """The splits that are read, in order, and which share of all that is read each is."""
    if data.source == "hub":
        named: Iterable[str] = hub_splits(data, sources)
    else:
        named = object_splits(data) if data.source == "python" else sources
    splits = [split for split in SPLITS if split in named]
    if "train" not in splits:
        message = f"there are no rows for train: {data.path} has {', '.join(named)}. Name them in data.splits.train."
        raise UserError([Problem(kind="data", where="data.splits.train", message=message)])
    sizes = {split: sum(_bytes(file) for file in sources[split]) if split in sources else 1 for split in splits}
    return {split: size / (sum(sizes.values()) or 1) for split, size in sizes.items()}


def _bytes(file: str) -> int:
    path = Path(file)
    return path.stat().st_size if path.is_file() else 1


@dataclass
class _Reading:
    """The first pass."""

    data: Data
    sources: Mapping[str, Any]
    kept: Path
    """Where the rows of each split are held as they are written."""
    progress: Progress
    surveys: dict[str, Survey] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    broken: list[Problem] = field(default_factory=list)
    """Why sources could not be read to their end."""

    def __post_init__(self) -> None:
        self.twins = Twins(self.kept)
        self.slices = Slices(self.data, self.kept)
        self._rows, self._before = 0, 0.0

    def read_all(self) -> None:
        """Reads every split, checks its rows, and keeps them; what is to be held out goes to splits of its own."""
        try:
            splits = _splits(self.data, self.sources)
        except UserError as error:
            self.broken += error.problems
            return
        for split, share in splits.items():
            self._read(split, share, held_out(self.data, splits) if split == "train" else {})
        self.surveys = {split: self.surveys[split] for split in SPLITS if split in self.surveys}

    def _read(self, split: str, share: float, cuts: Mapping[str, float]) -> None:
        into = {split: Survey(split), **{other: Survey(other, size) for other, size in cuts.items()}}
        schema = pa.schema([(name, pa.string()) for name in columns(self.data)])
        self.slices.begin(split, [name for name in into if name != "train"])
        blocks = READERS[self.data.source](self.data, split, self.sources, self.slices)
        try:
            with ExitStack() as stack:
                writers = {name: stack.enter_context(ipc_writer(self.kept / name, schema)) for name in into}
                for made in shaped(blocks, self.data):
                    into[split].filtered += made.filtered
                    block = without_faulty(made.block, self.data, into[split], self.faults)
                    self._keep(block, into, cuts, writers)
                    self._tell(made, share)
            self.surveys |= into
        except UserError as error:
            self.broken += error.problems
        self._before += share

    def _keep(
        self, block: Block, into: Mapping[str, Survey], cuts: Mapping[str, float], writers: Mapping[str, Any]
    ) -> None:
        hashes = hashes_of(block.rows)
        for name, mask in cut(hashes, cuts, next(iter(into))).items():
            part = block if mask is None else block.taken(mask)
            into[name].add(part, self.data)
            if len(into[name].labels) > MOST_LABELS:
                message = (
                    f"column {self.data.label!r} has more than {MOST_LABELS} different values in the {name} "
                    "split: is it the column of labels?"
                )
                raise UserError([Problem(kind="data", where="data.label", message=message)])
            self.twins.add(name, part, hashes if mask is None else hashes[mask])
            self.slices.add(name, part)
            writers[name].write(part.rows)

    def _tell(self, made: Shaped, share: float) -> None:
        self._rows += made.block.rows.num_rows + len(made.block.faults) + made.filtered
        if done := self._before + share * made.block.share:
            self.progress(self._rows, max(self._rows, round(self._rows / done)))

    def judged(self) -> tuple[list[str], dict[str, int], list[Problem]]:
        """The label names in order; the place of each label as rows write it; and everything that was found, each
        once, but for what the recipe ignores."""
        found = [*self.broken, *self.faults.problems(self.data)]
        if any(problem.level == "error" for problem in found):
            for survey in self.surveys.values():
                survey.as_if_corrected()
        train = self.surveys.get("train")
        if train is None:
            return [], {}, _told(found)
        parts = [survey for survey in self.surveys.values() if survey is train or survey.held_out is not None]
        seen = {label: 1 for survey in parts for label in survey.labels}
        try:
            names, places = label_places(self.data.label_names, train.named, seen)
        except UserError as error:
            return [], {}, _told([*found, *error.problems])
        if level_of("unknown_label", self.data) != "error":
            for survey in self.surveys.values():
                survey.leave_out_unknown(places)
        for survey in self.surveys.values():
            for name, check in SPLIT_CHECKS.items():
                level = level_of(name, self.data)
                if level != "ignore":
                    found += [
                        Problem(kind="data", where=one.where, message=one.message, check=name, level=level)
                        for one in check(survey, places, self.twins)
                    ]
        return names, places, _told(found)


def _told(found: Iterable[Problem]) -> list[Problem]:
    """Each problem once, errors first, and no more than anybody reads."""
    once = sorted(dict.fromkeys(found), key=lambda problem: problem.level)
    if more := once[MOST_PROBLEMS:]:
        message = f"… and {len(more):,} more problems: mend these, and check again."
        once[MOST_PROBLEMS:] = [Problem(kind="data", where="data", message=message, level=more[0].level)]
    return once


def label_places(
    wanted: Sequence[str] | None, stored: Sequence[str], seen: Mapping[str, int]
) -> tuple[list[str], dict[str, int]]:
    """The label names in order, and the place of each label as the rows write it.

    The order is that of the source where it names its labels, else that of the labels seen in the training
    rows: by value where all are whole numbers, else by spelling. Names that the recipe wants replace it:
    rows may spell these names; or whole numbers that count them from 0; or as many other whole numbers, in
    increasing order. Raises UserError where numbers are none of these.
    """
    natural = list(stored) or sorted(seen, key=int if all(map(_is_number, seen)) else str)
    if wanted is None:
        return natural, {label: place for place, label in enumerate(natural)}
    names = list(wanted)
    if natural and all(map(_is_number, natural)) and not set(natural) <= set(names):
        numbers = sorted(natural, key=int)
        if "0" in numbers and all(0 <= int(label) < len(names) for label in numbers):
            return names, {str(place): place for place in range(len(names))}
        if len(numbers) == len(names):
            return names, {label: place for place, label in enumerate(numbers)}
        message = (
            f"{len(names)} names cannot be told apart by the labels of train, {', '.join(numbers[:20])}: numbers count "
            "the names from 0, or there are as many of them. Write the names into the rows, or give more rows."
        )
        raise UserError([Problem(kind="data", where="data.label_names", message=message)])
    return names, {name: place for place, name in enumerate(names)}


def _is_number(label: str) -> bool:
    """Whether it is spelt as Python spells a whole number: `-1`, but not `01` or `1.0`."""
    digits = label.removeprefix("-")
    return label.isascii() and digits.isdecimal() and len(digits) < 20 and str(int(label)) == label


def _place_labels(as_written: Path, final: Path, places: Mapping[str, int]) -> Numbers:
    """The same rows with each label's place in its stead; gives which rows were left out, for an unknown label."""
    spelt, values = pa.array(list(places), pa.string()), pa.array(list(places.values()), pa.int64())
    gone = [np.zeros(0, np.int64)]
    done = 0

    def placed(reader: pa.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
        nonlocal done
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            labels = values.take(pc.index_in(batch.column("label"), value_set=spelt))
            rows = pa.RecordBatch.from_arrays([*batch.columns[:-1], labels], schema=schema)
            if labels.null_count:
                gone.append(done + np.flatnonzero(labels.is_null().to_numpy(zero_copy_only=False)))
                rows = rows.filter(labels.is_valid())
            done += len(labels)
            yield rows

    with ipc_reader(as_written, mapped=False) as reader:
        texts = [column for column in reader.schema if column.name != "label"]
        schema = pa.schema([*texts, ("label", pa.int64())])
        with ipc_writer(final, schema) as writer:
            for block in in_blocks(placed(reader), schema):
                writer.write(block)
    return np.concatenate(gone)


def _known(survey: Survey, places: Mapping[str, int]) -> dict[int, int]:
    """Rows by the place of their label; those with an unknown one are not there any more."""
    counts: dict[int, int] = {}
    for label, count in survey.labels.items():
        if label in places:
            counts[places[label]] = counts.get(places[label], 0) + count
    return counts


def _report(
    data: Data,
    surveys: Mapping[str, Survey],
    names: Sequence[str],
    places: Mapping[str, int],
    problems: Sequence[Problem],
) -> dict[str, Any]:
    counts = {split: _known(survey, places) for split, survey in surveys.items()}
    return {
        "rows": {split: sum(known.values()) for split, known in counts.items()},
        "labels": {
            split: {name: known.get(place, 0) for place, name in enumerate(names)} for split, known in counts.items()
        },
        "characters": {
            split: survey.characters.summary() | {"histogram": survey.characters.histogram()}
            for split, survey in surveys.items()
        },
        "held_out": {split: survey.held_out for split, survey in surveys.items() if survey.held_out is not None},
        "left_out": {split: survey.left_out for split, survey in surveys.items()},
        "filtered": {split: survey.filtered for split, survey in surveys.items()},
        "problems": [problem.model_dump() for problem in problems],
    }


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
