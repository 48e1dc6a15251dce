"""The program that compares new rows with a version's profile: `python -m training.programs.drift JOB`.

inputs     profile, rows (each a folder of training.programs.observe)
settings   DriftSettings, below
output     report.json     training.evaluation.drift.verdict.build_report
           log/report.png  all effects with their intervals and thresholds, and the distributions
result     DriftResult, below
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, Result, Settings


class InputRows(Settings):
    """The new rows."""

    rows: int
    without_prediction: int
    """Of the observed rows."""


class AccuracyValues(TypedDict):
    """The fields of training.evaluation.drift.verdict.EstimatedAccuracy."""

    value: float
    low: float
    high: float
    reference: float
    method: str


class DriftResult(Result):
    """The report without the details of its comparisons."""

    verdict: Literal["steady", "watch", "drifted", "undecided"]
    rows: dict[Literal["reference", "new"], int]
    """Observed rows."""
    alpha: float
    comparisons: list[dict[str, Any]]
    """Those of training.evaluation.drift.verdict.JudgedComparison."""
    estimated_accuracy: AccuracyValues | None
    look: int | None
    input: InputRows


class DriftSettings(Settings):
    """The settings of a job of this program."""

    title: str
    """The version and the rows, for the page of pictures."""
    look: int | None
    """The number of the comparison among all of the version; None if there are too few rows to compare."""
    input: InputRows
    alpha: float
    """The error level of the whole report."""
    min_rows: int
    """With fewer rows on either side, nothing is compared."""
    cohens_w: float
    """The smallest effect that matters, for categories."""
    distance: float
    """The same for numbers: the Kolmogorov-Smirnov distance."""
    auc: float
    """The same for words and embeddings: the held-out AUC."""


def main(job_dir: Path, job: Job, events: Events) -> DriftResult:
    """Compares the rows."""
    from training.evaluation.drift.report_plots import draw_report
    from training.evaluation.drift.verdict import Thresholds, build_report, read_observations

    settings = DriftSettings.model_validate(job.settings)
    reference, new = (read_observations(Path(job.inputs[name])) for name in ("profile", "rows"))
    thresholds = Thresholds(settings.cohens_w, settings.distance, settings.auc)
    report = build_report(reference, new, thresholds, alpha=settings.alpha, min_rows=settings.min_rows)
    output = job_dir / OUTPUT
    (output / "log").mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (output / "report.json").write_text(text, encoding="utf-8", errors="backslashreplace")
    draw_report(report, reference, new, settings.title, output / "log" / "report.png")
    return DriftResult(**report, look=settings.look, input=settings.input)


if __name__ == "__main__":
    run_program(main)
