"""Random samples of the rows of files, for drift reports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks.prediction.input_rows import Progress, Shard, require_usable_files, scan_rows
from tasks.registry.model_spec import ModelSpec
from tasks.registry.monitored_versions import (
    MonitoredVersion,
    find_monitored,
    read_drift_section,
    require_single_inputs,
)
from training import task_types
from training.data.casting import Values
from training.data.listing import SourceFile
from training.data.prediction_rows import RowReader, Rows, digest_inputs
from training.evaluation.drift.sampling import Reservoir
from training.problems import UserError
from training.recipe.batch_prediction import SHARD_ROWS
from training.recipe.fields import Drift

FIELD = "inputs"
"""The parameter of the flow `drift` with the paths."""


@dataclass(frozen=True)
class Sample:
    """Rows as the model reads them."""

    rows: Sequence[Values | None]
    """The model's inputs of each row, in a random order; None for a row that cannot be used."""
    total: int
    """The number of rows that the sample was drawn from."""

    @property
    def digest(self) -> str:
        """Of the rows, hex."""
        digest = hashlib.sha256()
        for line in self._lines():
            digest.update(line)
        return digest.hexdigest()

    def write(self, file: Path) -> None:
        """Writes the inputs of each row, or null, as a line of JSON."""
        with file.open("wb") as out:
            out.writelines(self._lines())

    def _lines(self) -> Iterable[bytes]:
        return (json.dumps(values, separators=(",", ":")).encode() + b"\n" for values in self.rows)


def draw_sample(
    version: MonitoredVersion, files: Sequence[SourceFile], most: int, progress: Progress
) -> tuple[Sample, list[str]]:
    """Draws at most `most` rows at random from all files. They are read as for a batch prediction; rows that the filter
    of the training data drops are left out. Returns warnings about the rows too.

    Raises UserError with the problems of all files, and if there are no rows.
    """
    task_type = task_types.load(version.task, version.options)
    reader = RowReader(task_type, version.columns, rules=version.rules, needs_filter=True)
    reservoir = Reservoir[Values | None](most)
    scan = scan_rows(
        files, reader, SHARD_ROWS, None, progress, lambda _, rows: reservoir.add(rows.like_training_rows()), field=FIELD
    )
    require_usable_files(scan.unusable, FIELD)
    if not reservoir.total:
        message = "data.filter removes all rows: give files that have others, or set it to null."
        raise UserError.of("data", FIELD, message)
    return Sample(reservoir.draw(), reservoir.total), scan.warnings()


class ComparedShard(NamedTuple):
    """The rows at the beginning of a shard that a drift report has compared. Stored as JSON."""

    file: str
    number: int
    rows: int
    digest: str
    """Of the model's inputs in the usable ones among these rows."""


class NewRows:
    """Finds the new rows of a scan, and draws a sample of them.

    Args:
        most: rows of the sample.
        compared: of the last run into this output; None if there was none, or if it compared nothing.
        is_stored: whether a shard was predicted before. Without `compared`, these rows are not new.
    """

    def __init__(self, most: int, compared: Iterable[ComparedShard] | None, is_stored: Callable[[Shard], bool]) -> None:
        earlier = list(compared or ())
        self._is_stored = is_stored if compared is None else lambda shard: False
        self._digests = {shard.digest for shard in earlier}
        self._by_place = {(shard.file, shard.number): shard for shard in earlier}
        self._reservoir = Reservoir[Values | None](most)
        self.before: list[ComparedShard] = []
        """The rows of this scan that are not new."""
        self.all: list[ComparedShard] = []
        """All rows of this scan."""
        self.files: dict[str, None] = {}
        """The files with new rows, in the order of the scan."""

    @property
    def total(self) -> int:
        """The number of new rows, usable or not."""
        return self._reservoir.total

    def add(self, shard: Shard, rows: Rows) -> None:
        """Adds the next shard of the scan with its rows."""
        self.all.append(ComparedShard(shard.file, shard.number, shard.rows, shard.digest))
        known = self._find_compared(shard, rows)
        if known is not None:
            self.before.append(known)
        new = rows.like_training_rows(start=known.rows if known else 0)
        if new:
            self.files[shard.file] = None
        self._reservoir.add(new)

    def draw(self) -> Sample:
        """The sample. Call it once."""
        return Sample(self._reservoir.draw(), self.total)

    def _find_compared(self, shard: Shard, rows: Rows) -> ComparedShard | None:
        """The first rows of the shard that are not new: all of them, or those before others were appended."""
        if shard.digest in self._digests or self._is_stored(shard):
            return self.all[-1]
        known = self._by_place.get((shard.file, shard.number))
        if known is None:
            return None
        first = Rows(rows.numbers[: known.rows], rows.inputs[: known.rows], rows.errors[: known.rows])
        return known if digest_inputs(first) == known.digest else None


@dataclass(frozen=True)
class Monitoring:
    """The version that a batch prediction monitors."""

    version: MonitoredVersion
    section: Drift
    """The thresholds of its recipe."""
    new_rows: NewRows


def find_monitoring(
    model: ModelSpec, own_task: str, compared: Sequence[Sequence[Any]] | None, is_stored: Callable[[Shard], bool]
) -> Monitoring | str:
    """The monitoring of this version, or the reason why it has none. `compared` are ComparedShards as JSON has them;
    for the others see NewRows."""
    try:
        version = find_monitored(f"{model.name}/{model.version}", own_task)
        require_single_inputs(version)
        section = read_drift_section(version, {})
    except UserError as error:
        return " ".join(problem.message for problem in error.problems)
    earlier = None if compared is None else [ComparedShard(*shard) for shard in compared]
    return Monitoring(version, section, NewRows(section.max_rows, earlier, is_stored))
