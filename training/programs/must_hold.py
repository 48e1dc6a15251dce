"""The program that finds the rows that a model must have right and has wrong: `python -m training.programs.must_hold
JOB`.

inputs     predictions (test.parquet of training.programs.predict_champion), data (test.arrow, labels.json, and
           test.slices.arrow if the rows have other columns)
settings   MustHoldSettings, below
output     held.json              the result
           log/must_hold.csv      all rows that are wrong, those with a reason first
result     training.evaluation.scores.HeldRows
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training import task_types
from training.data.ipc_files import read_labels, read_table
from training.data.row_problems import shorten
from training.evaluation.scores import HeldRows, WrongRow
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, TaskSettings
from training.problems import UserError
from training.programs.score import read_inputs, read_predictions, write_samples

SPLIT = "test"
"""The name of the rows' split: load_data keeps its other columns."""
MOST_LISTED = 50


class MustHoldSettings(TaskSettings):
    """The settings of a job of this program."""

    reason: str
    """The column of reasons."""


def main(job_dir: Path, job: Job, events: Events) -> HeldRows:
    """Finds the rows that are wrong. Raises UserError if predictions are neither right nor wrong."""
    settings = MustHoldSettings.model_validate(job.settings)
    task_type, data = task_types.load(settings.task, settings.options), Path(job.inputs["data"])
    labels = read_labels(data)
    predicted = read_predictions(task_type, Path(job.inputs["predictions"]) / f"{SPLIT}.parquet", labels)
    if predicted.correct is None:
        message = "the predictions of this task type are neither right nor wrong: remove it."
        raise UserError.of("release", "release.gate.must_hold", message)
    reasons = read_reasons(data / f"{SPLIT}.slices.arrow", settings.reason, len(predicted))
    named = np.array([bool(reason) for reason in reasons], bool)
    wrong = np.flatnonzero(~predicted.correct)
    wrong = wrong[np.argsort(~named[wrong], kind="stable")]
    found = [
        WrongRow(
            row=row,
            text=" | ".join(map(shorten, inputs.values())),
            label=shorten(predicted.describe_row(row, inputs)["label"]),
            prediction=shorten(predicted.describe_row(row, inputs)["prediction"]),
            reason=reasons[row],
        )
        for row, inputs in zip(wrong.tolist(), read_inputs(data / f"{SPLIT}.arrow", wrong), strict=True)
    ]
    output = job_dir / OUTPUT
    (output / "log").mkdir(parents=True, exist_ok=True)
    write_samples([row.model_dump() for row in found], output / "log" / "must_hold.csv")
    held = HeldRows(
        named=int(named.sum()),
        named_wrong=int(named[wrong].sum()),
        others=int((~named).sum()),
        others_wrong=int((~named[wrong]).sum()),
        wrong=found[:MOST_LISTED],
    )
    (output / "held.json").write_text(held.model_dump_json(indent=1), encoding="utf-8")
    return held


def read_reasons(file: Path, column: str, rows: int) -> list[str]:
    """The reason of each row; an empty text for a row without one, and for all if there is no such column."""
    if not file.is_file():
        return [""] * rows
    table = read_table(file)
    return [text or "" for text in table[column].to_pylist()] if column in table.column_names else [""] * rows


if __name__ == "__main__":
    run_program(main)
