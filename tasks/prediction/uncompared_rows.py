"""The rows of a batch prediction that no earlier run into the same output has compared with the version's profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks.prediction.sample import Sample
from tasks.prediction.scan import Shard
from tasks.registry.monitored import Monitored, find_monitored, read_drift_section, require_single_inputs
from tasks.registry.prediction_job import ModelSpec
from training.data.casting import Values
from training.data.prediction_rows import Rows, digest_inputs
from training.evaluation.drift.sampling import Reservoir
from training.problems import UserError
from training.recipe.fields import Drift


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

    version: Monitored
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
