"""The program that evaluates a registered version on rows with labels: `python -m training.programs.evaluate JOB`.

inputs     predictions (test.parquet of training.programs.predict_champion), data (test.arrow, test.slices.arrow,
           labels.json, and test.groups.arrow if rows have groups); expected (SPLIT.parquet of
           training.programs.predict) and expected_data (SPLIT.arrow, labels.json, SPLIT.groups.arrow), if they are
           stored
settings   EvaluateSettings, below
output     evaluation.json              the result, and `slices` as in training.programs.score
           log/predictions_sample.csv   the most confident mistakes
           log/*.png                    plots of the predictions
result     EvaluateResult, below
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from training import task_types
from training.data.ipc_files import read_labels, read_table
from training.evaluation import slices
from training.evaluation.bootstrap import DRAWS, SEED, draw_differences, interval, match_rows
from training.evaluation.predictions import ManyLabels, OneLabel, Predictions
from training.evaluation.row_groups import Groups, read_hashes
from training.evaluation.scores import Score, Scores, SliceGroup
from training.evaluation.stored_calibration import Calibration, MeasuredConfidence
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, Result, TaskSettings
from training.programs.score import (
    compute_scores,
    find_groups,
    or_null,
    read_predictions,
    sample_worst_rows,
    score_groups,
    write_samples,
)

if TYPE_CHECKING:
    from training.task_types.task_type import TaskType

SPLIT = "test"
"""The name of the evaluated rows' split."""


class EvaluateResult(Result):
    """The metrics of the rows, and their differences from those at the registration."""

    rows: int
    groups: int | None
    """None if each row is one of its own."""
    shared_rows: int | None
    """Rows that are also in the judged split; None if that is not stored."""
    metrics: Scores
    differences: Scores
    confidence: MeasuredConfidence | None = None
    """Of a calibrated version."""


class EvaluateSettings(TaskSettings):
    """The settings of a job of this program."""

    metrics: list[str]
    slices: list[str]
    """Columns, `label` or `length_bucket`."""
    fewest_rows: int
    """Groups with fewer rows have no intervals."""
    most_groups: int
    """The largest groups of a slice that have figures."""
    columns: list[str]
    """The model's input columns, by which rows are equal."""
    split: str
    """The split that was judged."""
    expected: Scores
    """Of the judged split."""
    calibration: Calibration | None


def main(job_dir: Path, job: Job, events: Events) -> EvaluateResult:
    """Evaluates the rows."""
    from training.evaluation import plots

    settings = EvaluateSettings.model_validate(job.settings)
    task_type, output = task_types.load(settings.task, settings.options), job_dir / OUTPUT
    (output / "log").mkdir(parents=True, exist_ok=True)
    data = Path(job.inputs["data"])
    predicted = _read(task_type, Path(job.inputs["predictions"]), SPLIT, data)
    groups = Groups.read(data, SPLIT, predicted)

    def report(done: int) -> None:
        events.progress(phase="evaluate", done=done, total=2 * DRAWS)

    found = compute_scores(settings.metrics, predicted, report, groups)
    shared, differences = _compare(task_type, predicted, found, job, settings, lambda done: report(DRAWS + done))
    sliced = {name: _score_slice(name, predicted, found, job, settings, events, groups) for name in settings.slices}
    evaluated = EvaluateResult(
        rows=len(predicted),
        groups=len(groups.sizes) if groups else None,
        shared_rows=shared,
        metrics=found,
        differences=differences,
        confidence=_measure_confidence(predicted, job, settings.calibration),
    )
    report_text = json.dumps(evaluated.model_dump(mode="json") | {"slices": sliced}, indent=1, ensure_ascii=False)
    (output / "evaluation.json").write_text(report_text, encoding="utf-8", errors="backslashreplace")
    plots.draw_scores(predicted, SPLIT, output / "log")
    worst = sample_worst_rows(task_type, SPLIT, predicted, data / f"{SPLIT}.arrow", output / "log")
    write_samples(worst, output / "log" / "predictions_sample.csv")
    return evaluated


def _measure_confidence(predicted: Predictions, job: Job, calibration: Calibration | None) -> MeasuredConfidence | None:
    """The errors of a calibrated version's probabilities and answers; None if the rows have other labels."""
    if calibration is None or not isinstance(predicted, OneLabel | ManyLabels):
        return None
    if [*predicted.labels] != calibration.labels:
        return None
    return calibration.measure(pq.read_table(Path(job.inputs["predictions"], f"{SPLIT}.parquet")), predicted)


def _compare(
    task_type: TaskType, predicted: Predictions, found: Scores, job: Job, settings: EvaluateSettings, report: Any
) -> tuple[int | None, Scores]:
    """The number of rows that are also in the judged split, None if that is not stored; and the differences of the
    metrics from those at the registration."""
    if "expected" not in job.inputs:
        return None, {name: _difference_of_scores(score, settings.expected.get(name)) for name, score in found.items()}
    from training.evaluation.metrics.resampling import figures

    data = Path(job.inputs["expected_data"])
    expected = _read(task_type, Path(job.inputs["expected"]), settings.split, data)
    files = (Path(job.inputs["data"], f"{SPLIT}.arrow"), data / f"{settings.split}.arrow")
    samples = (predicted, expected)
    contents = [_row_contents(file, settings.columns, of) for file, of in zip(files, samples, strict=True)]
    *places, shared = match_rows(*contents)
    hashes = read_hashes(Path(job.inputs["data"]), SPLIT, predicted), read_hashes(data, settings.split, expected)
    is_single = False
    if hashes[0] is not None and hashes[1] is not None:  # a row of both samples has the same group in both
        places = np.split(Groups.of(np.concatenate(hashes)).numbers, [len(hashes[0])])  # type: ignore[arg-type]
        is_single = any(len(np.unique(of_sample)) < 2 for of_sample in places)
    both = [figures(settings.metrics, sample) for sample in samples]
    names = [name for name in both[0] if name in both[1]]
    pairs = ([both[0][name] for name in names], [both[1][name] for name in names])
    draws = draw_differences(pairs, (places[0], places[1]), DRAWS, SEED, report)
    differences: Scores = {}
    for name, of_metric in zip(names, draws, strict=True):
        low, high = (math.nan, math.nan) if is_single else interval(of_metric)
        gain = _gain(found[name], settings.expected.get(name))
        differences[name] = {"value": gain, "low": or_null(low), "high": or_null(high)}
    return shared, differences


def _read(task_type: TaskType, predictions: Path, split: str, data: Path) -> Predictions:
    labels = read_labels(data)
    return read_predictions(task_type, predictions / f"{split}.parquet", labels)


def _row_contents(file: Path, columns: Sequence[str], predicted: Predictions) -> list[str]:
    """The model's inputs of the row of each entry of the predictions, as one text."""
    table = read_table(file).select(list(columns))
    table = table.take(predicted.rows_of(np.arange(len(predicted))))
    return [json.dumps(list(row.values()), ensure_ascii=False) for row in table.to_pylist()]


def _gain(now: Score, expected: Score | None) -> float | None:
    value, before = now["value"], expected["value"] if expected else None
    return None if value is None or before is None else value - before


def _difference_of_scores(now: Score, expected: Score | None) -> Score:
    """The difference of two independent figures, by the normal approximation of their intervals."""
    gain, widths = _gain(now, expected), [_half_width(score) for score in (now, expected)]
    if gain is None or widths[0] is None or widths[1] is None:
        return {"value": gain, "low": None, "high": None}
    half = math.hypot(widths[0], widths[1])
    return {"value": gain, "low": gain - half, "high": gain + half}


def _half_width(score: Score | None) -> float | None:
    low, high = (score.get("low"), score.get("high")) if score else (None, None)
    return None if low is None or high is None else (high - low) / 2


def _score_slice(
    name: str,
    predicted: Predictions,
    whole: Scores,
    job: Job,
    settings: EvaluateSettings,
    events: Events,
    of_rows: Groups | None,
) -> list[SliceGroup]:
    """The scores of a slice's largest groups. `of_rows` are the groups of data.split."""
    if not (groups := find_groups(name, SPLIT, predicted, job)):
        events.warning(f"the rows have no column {name!r}, so no groups of it.")
    shown = slices.largest(groups, settings.most_groups, ())
    with_interval = {group for group, rows in shown.items() if len(rows) >= settings.fewest_rows}
    return score_groups(shown, with_interval, predicted, whole, settings.metrics, lambda done, total: None, of_rows)


if __name__ == "__main__":
    run_program(main)
