"""Random samples of the rows of files, for drift reports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.prediction.scan import Progress, require_usable_files, scan_rows
from tasks.registry.monitored import Monitored
from training import task_types
from training.data.casting import Values
from training.data.listing import SourceFile
from training.data.prediction_rows import RowReader
from training.evaluation.drift.sampling import Reservoir
from training.problems import UserError
from training.recipe.batch_prediction import SHARD_ROWS

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
    version: Monitored, files: Sequence[SourceFile], most: int, progress: Progress
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
