"""Random samples of the rows of files, for drift reports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.prediction.scan import Progress
from tasks.registry.monitored import Monitored
from training import task_types
from training.data.listing import SourceFile
from training.data.model_inputs import Values
from training.data.prediction_rows import RowReader
from training.evaluation.drift.sampling import Reservoir
from training.problems import Problem, UserError


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


def draw_sample(version: Monitored, files: Sequence[SourceFile], most: int, progress: Progress) -> Sample:
    """Reads the rows of all files as a batch prediction does, and draws at most `most` of them.

    Raises UserError with the problems of all files, and if there are no rows.
    """
    reader = RowReader(task_types.load(version.task, version.options), version.columns)
    reservoir, problems = Reservoir[Values | None](most), list[Problem]()
    for done, file in enumerate(files, 1):
        try:
            for rows in reader.read(file.file):
                reservoir.add(rows.inputs)
        except UserError as error:
            problems += error.problems
        progress(done, len(files))
    if not problems and not reservoir.total:
        problems.append(Problem(kind="data", where="inputs", message="hold no rows: give files that have some."))
    if problems:
        raise UserError(problems)
    return Sample(reservoir.draw(), reservoir.total)
