"""The program that scores stored predictions, without a model: `python -m training.programs.score JOB`.

inputs     predictions (SPLIT.parquet of training.programs.predict), data (SPLIT.arrow, labels.json,
           SPLIT.slices.arrow for slices of columns, and SPLIT.groups.arrow if rows have groups); tokens (SPLIT.arrow)
           and model (the trained model's folder) for the baseline alone
settings   ScoreSettings, below
output     metrics.json                     {"validation": {"accuracy": {"value": 0.8, "low": 0.7, "high": 0.9,
                                            "baseline": 0.6}}}
           slices.json, if there are any    {"validation": {"genre": [{"group": "war", "rows": 312, "metrics": {…}}]}}
           log/slices_SPLIT_SLICE.png       the first metrics of each group, with their intervals
           log/*_SPLIT.png                  plots of the predictions: training.evaluation.plots.draw_scores
           log/worst_SPLIT.png              the images of the sample
           log/predictions_sample.csv       the most confident mistakes, then the least confident hits
result     Scores by split, the content of metrics.json; a number is null if it is undefined

`low` and `high` are the ends of a value's 95 % interval: of 1,000 draws of as many rows, or of as many groups if rows
have groups, 950 lie between them. They are null if all rows are of one group, if the metric is undefined on all draws,
for groups with few rows, and for groups if the metric is not the project's. `baseline` is the value of the best
constant prediction by that metric, or of another rival (training/evaluation/baseline.py); it is missing if the task
type has none, or if a user's metric refuses constant predictions.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from training import task_types
from training.data.ipc_files import read_labels, read_table
from training.evaluation import slices
from training.evaluation.bootstrap import DRAWS, SEED, draw_figures, interval
from training.evaluation.predictions import OneLabel, Predictions, Rows
from training.evaluation.row_groups import Groups
from training.evaluation.scores import Score, Scores, SliceGroup, SplitScores
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, TaskSettings
from training.problems import UserError
from training.recipe.rules.slice_rules import LABEL, LENGTH

if TYPE_CHECKING:
    import evaluate

    from training.task_types.task_type import TaskType

SAMPLE_ROWS = 50
UNDEFINED: Score = {"value": None, "low": None, "high": None}


class ScoreSettings(TaskSettings):
    """The settings of a job of this program."""

    splits: list[str]
    metrics: list[str]
    slices: list[str]
    """Columns, `label` or `length_bucket`."""
    each: list[str]
    """The slices with a floor for each group: every group of these has figures."""
    named: dict[str, list[str]]
    """Groups that a floor names, by slice; these are always shown."""
    fewest_rows: int
    """Groups with fewer rows have no intervals."""
    most_groups: int
    """The largest groups of a slice that are shown: they are drawn, and have intervals."""


def main(job_dir: Path, job: Job, events: Events) -> SplitScores:
    """Scores every split that has predictions. Returns the scores by split."""
    from training.evaluation import metrics, plots
    from training.evaluation.baseline import choose_rival, compute_values

    settings = ScoreSettings.model_validate(job.settings)
    task_type = task_types.load(settings.task, settings.options)
    output = job_dir / OUTPUT
    (output / "log").mkdir(parents=True, exist_ok=True)
    predictions, data, tokens, model = (Path(job.inputs[name]) for name in ("predictions", "data", "tokens", "model"))
    labels = read_labels(data)
    baseline = task_type.baseline(data, tokens, model, labels)
    rivals = {name: choose_rival(baseline, name) for name in settings.metrics} if baseline else {}
    found: SplitScores = {}
    sliced: dict[str, dict[str, list[SliceGroup]]] = {}
    samples: list[dict[str, Any]] = []
    for split in sorted(settings.splits):
        predicted = read_predictions(task_type, predictions / f"{split}.parquet", labels)
        groups = Groups.read(data, split, predicted)
        found[split] = compute_scores(settings.metrics, predicted, partial(_report_draws, events, split), groups)
        for rival in dict.fromkeys(rivals.values()):
            chosen = [metric for metric in rivals if rivals[metric] is rival]
            for name, value in compute_values(chosen, rival.predict(predicted, split)).items():
                if name in found[split]:  # a user's metric may name its figures after the predictions
                    found[split][name]["baseline"] = or_null(value)
        for name in (name for name, score in found[split].items() if score["value"] is None):
            events.warning(f"{name} has no value on {split}: see its row in docs/reference/metrics.md.")
        for remark in metrics.remarks(settings.metrics, predicted):
            events.warning(f"{split}: {remark}")
        if predicted.caveat:
            events.warning(f"{split}: {predicted.caveat}")
        plots.draw_scores(predicted, split, output / "log")
        sliced[split] = _score_slices(split, predicted, found[split], job, output / "log", events, groups)
        samples += sample_worst_rows(task_type, split, predicted, data / f"{split}.arrow", output / "log")
    (output / "metrics.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    if settings.slices:
        (output / "slices.json").write_text(json.dumps(sliced, indent=1, ensure_ascii=False), encoding="utf-8")
    write_samples(samples, output / "log" / "predictions_sample.csv")
    return found


def _report_draws(events: Events, split: str, done: int) -> None:
    events.progress(phase="score", split=split, done=done, total=DRAWS)


def read_predictions(task_type: TaskType, file: Path, labels: Sequence[str], without: str = "") -> Predictions:
    """Reads a split's predictions as training.programs.predict writes them, without the columns whose names begin with
    `without`."""
    table = pq.read_table(file)
    left_out = [name for name in table.column_names if without and name.startswith(without)]
    return task_type.metric_inputs(table.drop_columns(left_out), labels)


def compute_scores(
    names: Sequence[str],
    predicted: Predictions,
    report: Callable[[int], None] = lambda done: None,
    groups: Groups | None = None,
) -> Scores:
    """The metrics of these rows with their intervals; `report` is called with the number of finished draws. `groups`
    are those of the rows, if they have any."""
    from training.evaluation import metrics
    from training.evaluation.metrics.resampling import figures

    values = metrics.compute(names, predicted)
    # Nothing can be drawn of no entry, such as of queries that all lack a relevant document; of one group, each draw
    # would be all rows.
    if not len(predicted) or (groups is not None and len(groups.sizes) < 2):
        report(DRAWS)
        return {name: {"value": or_null(value), "low": None, "high": None} for name, value in values.items()}
    of_rows, numbers = list(figures(names, predicted).values()), groups.numbers if groups else None
    draws = draw_figures(of_rows, len(predicted), DRAWS, SEED, report, numbers)
    ends = [map(or_null, interval(of_metric)) for of_metric in draws]
    found = zip(values.items(), ends, strict=True)
    return {name: {"value": or_null(value), "low": low, "high": high} for (name, value), (low, high) in found}


def or_null(value: float) -> float | None:
    """The number as JSON has it: None for NaN and the infinities."""
    return value if math.isfinite(value) else None


def _score_slices(
    split: str,
    predicted: Predictions,
    whole: Scores,
    job: Job,
    folder: Path,
    events: Events,
    of_rows: Groups | None,
) -> dict[str, list[SliceGroup]]:
    """The scores of each slice's groups; plots of them go to the folder. `of_rows` are the groups of data.split."""
    from training.evaluation import plots

    settings = ScoreSettings.model_validate(job.settings)
    found: dict[str, list[SliceGroup]] = {}
    for name in settings.slices:
        if not (groups := find_groups(name, split, predicted, job)):
            events.warning(f"{split} has no column {name!r}, so no groups of it.")
            continue
        shown = slices.largest(groups, settings.most_groups, settings.named.get(name, ()))
        all_scored = name in settings.each
        if len(shown) < len(groups):
            kept = f"only the largest and those that floors name have {'intervals' if all_scored else 'figures'}"
            events.warning(f"{name} has {len(groups):,} groups in {split}: {kept}, {len(shown)} in all.")
        with_interval = {group for group, rows in shown.items() if len(rows) >= settings.fewest_rows}
        report = partial(_report_groups, events, split)
        scored = groups if all_scored else shown
        found[name] = score_groups(scored, with_interval, predicted, whole, settings.metrics, report, of_rows)
        plots.draw_slice(name, split, [group for group in found[name] if group["group"] in shown], whole, folder)
    return found


def _report_groups(events: Events, split: str, done: int, total: int) -> None:
    events.progress(phase="slices", split=split, done=done, total=total)


def find_groups(name: str, split: str, predicted: Predictions, job: Job) -> dict[str, Rows]:
    """The groups of a slice, from the inputs `predictions` and `data` of a job."""
    if name == LABEL:
        return slices.of_label(predicted.references, predicted.labels) if isinstance(predicted, OneLabel) else {}
    if name == LENGTH:
        rows = pq.read_table(Path(job.inputs["predictions"], f"{split}.parquet"), columns=["tokens"])
        return slices.of_entries(slices.of_length(rows["tokens"].to_numpy()), predicted)
    return slices.of_entries(slices.of_column(Path(job.inputs["data"], f"{split}.slices.arrow"), name), predicted)


def score_groups(
    groups: Mapping[str, Rows],
    with_interval: Container[str],
    predicted: Predictions,
    whole: Scores,
    names: Sequence[str],
    report: Callable[[int, int], None],
    of_rows: Groups | None = None,
) -> list[SliceGroup]:
    """The scores of these groups of a slice, for the figures of the whole split. `report` is called with the numbers of
    finished draws and of all draws; a group counts as DRAWS with or without intervals. `of_rows` are the groups of
    data.split."""
    from training.evaluation import metrics

    made = metrics.make(names, predicted)
    found: list[SliceGroup] = []
    for place, (group, rows) in enumerate(groups.items()):

        def report_group(done: int, before: int = place * DRAWS) -> None:
            report(before + done, len(groups) * DRAWS)

        kept = of_rows.take(rows) if of_rows else None
        scores = score_group(made, predicted.take(rows), group in with_interval, report_group, kept)
        by_figure = {figure: scores.get(figure, UNDEFINED) for figure in whole}
        found.append({"group": group, "rows": len(rows), "metrics": by_figure})
    return found


def score_group(
    made: Mapping[str, evaluate.Metric],
    predicted: Predictions,
    intervals: bool,
    report: Callable[[int], None] = lambda done: None,
    groups: Groups | None = None,
) -> Scores:
    """The metrics of these rows, without those that refuse the rows. Only the project's metrics have intervals."""
    from training.evaluation import metrics

    bootstrapped = [name for name in made if intervals and name in metrics.list_known(predicted)]
    found = compute_scores(bootstrapped, predicted, report, groups) if bootstrapped else {}
    if not bootstrapped:
        report(DRAWS)
    for name, metric in made.items():
        if name not in bootstrapped:
            with contextlib.suppress(ValueError, ArithmeticError, UserError):
                for figure, value in metrics.compute_made({name: metric}, predicted).items():
                    found[figure] = {"value": or_null(value), "low": None, "high": None}
    return found


def sample_worst_rows(
    task_type: TaskType, split: str, predicted: Predictions, data: Path, log: Path
) -> list[dict[str, Any]]:
    """The SAMPLE_ROWS rows with the lowest row scores, lowest first. Those of images are drawn, `worst_SPLIT.png`."""
    worst = np.argsort(predicted.row_scores, kind="stable")[:SAMPLE_ROWS]
    rows, images = predicted.rows_of(worst), task_type.image_columns()
    samples = [
        {"split": split, "row": row, **inputs, **predicted.describe_row(entry, inputs)}
        for entry, row, inputs in zip(worst.tolist(), rows.tolist(), read_inputs(data, rows, images), strict=True)
    ]
    if images and samples:
        from training.evaluation import plots

        plots.draw_images(data, images[0], samples, log / f"worst_{split}.png")
    return samples


def read_inputs(
    data: Path, rows: np.ndarray[Any, np.dtype[np.int64]], without: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The inputs of these rows of a split, as load_data stored them, but for the columns `without`."""
    table = read_table(data)
    names = [name for name in table.column_names if name not in ("label", *without)]
    # A table without columns has no rows.
    return list(table.select(names).take(rows).to_pylist()) if names else [{} for _ in rows]


def write_samples(samples: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Writes rows as CSV, with the keys of the first as header; without rows, an empty file."""
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, fieldnames=list(samples[0]) if samples else [])
        writer.writeheader()
        writer.writerows(samples)


if __name__ == "__main__":
    run_program(main)
