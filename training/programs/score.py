"""The program that scores: `python -m training.programs.score JOB`. It reads stored predictions and needs no model.

inputs     predictions (SPLIT.parquet of training.programs.predict), data (SPLIT.arrow, SPLIT.slices.arrow);
           tokens (SPLIT.arrow) and model (the trained model's folder) for the baseline alone
settings   training.recipe.program_settings.ScoreSettings
output     metrics.json                     {"validation": {"accuracy": {"value": 0.8, "low": 0.7, "high": 0.9,
                                            "baseline": 0.6}}}
           slices.json, if there are any    {"validation": {"genre": [{"group": "war", "rows": 312, "metrics": {…}}]}}
           log/slices_SPLIT_SLICE.png       the first metrics of each group, with their intervals
           log/confusion_SPLIT.png          rows by true and predicted label (this and the next two: of one label a row)
           log/calibration_SPLIT.png        how often predictions are right, by their probability
           log/precision_recall_SPLIT.png   what finding more of a label's rows costs
           log/spans_SPLIT.png              precision, recall and F1 of each type of span, where words have tags
           log/predictions_sample.csv       the most confident mistakes, then the least confident hits
figures    SPLIT.METRIC, each a number, or null where it has no value

A value's `low` and `high` are the ends of its 95 % interval: of 1,000 draws of as many rows, 950 lie between them. They
are null where the metric has no value on any draw. Of groups, few rows have none, nor has a metric that is not the
project's own and would have to be computed anew on each draw. `baseline` is the figure of the best constant answer by
that metric (training/evaluation/baseline.py); it is missing where the task type has none, and where a metric of the
user's refuses constant predictions.
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
import pyarrow as pa
import pyarrow.parquet as pq

from training.evaluation import slices
from training.evaluation.predictions import OneLabel, Predictions
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job
from training.problems import UserError
from training.recipe.program_settings import ScoreSettings
from training.recipe.rules.slice_rules import LABEL, LENGTH

if TYPE_CHECKING:
    import evaluate

    from training.task_types.task_type import TaskType

SAMPLE_ROWS = 50
DRAWS = 1_000
SEED = 0
ENDS = (0.025, 0.975)

Scores = dict[str, dict[str, float | None]]
"""By metric: value, low and high, null where there is none; and of all rows of a split the baseline."""
NOTHING: dict[str, float | None] = {"value": None, "low": None, "high": None}

Slice = list[dict[str, Any]]
"""A group each: its name, its number of rows, and its scores as `metrics`."""


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Score every split that has predictions; gives the figures."""
    from training import task_types
    from training.evaluation import plots
    from training.evaluation.baseline import best, values

    settings = ScoreSettings.model_validate(job.settings)
    task_type, labels = task_types.load(settings.task, settings.options), settings.labels
    output = job_dir / OUTPUT
    (output / "log").mkdir(parents=True, exist_ok=True)
    data, tokens, model = (Path(job.inputs[name]) for name in ("data", "tokens", "model"))
    baseline = task_type.baseline(data, tokens, model, labels)
    constants = {name: best(baseline, name) for name in settings.metrics} if baseline else {}
    found: dict[str, Scores] = {}
    sliced: dict[str, dict[str, Slice]] = {}
    samples: list[dict[str, Any]] = []
    for file in sorted(Path(job.inputs["predictions"]).glob("*.parquet")):
        split = file.stem
        predicted = read(task_type, file, labels)
        found[split] = scores(settings.metrics, predicted, partial(_tell, events, split))
        for metric, constant in constants.items():
            for name, value in values([metric], constant.answered(predicted, split)).items():
                if name in found[split]:  # a user's metric may name its figures by what was predicted
                    found[split][name]["baseline"] = _or_null(value)
        for name in (name for name, score in found[split].items() if score["value"] is None):
            events.warning(f"{name} has no value on {split}: docs/reference/metrics.md says when it has none.")
        if predicted.caveat:
            events.warning(f"{split}: {predicted.caveat}")
        plots.draw_scores(predicted, split, output / "log")
        sliced[split] = _sliced(split, predicted, found[split], job, output / "log", events)
        samples += worst_rows(split, predicted, Path(job.inputs["data"]) / f"{split}.arrow")
    (output / "metrics.json").write_text(json.dumps(found, indent=1))
    if settings.slices:
        (output / "slices.json").write_text(json.dumps(sliced, indent=1, ensure_ascii=False), encoding="utf-8")
    write_samples(samples, output / "log" / "predictions_sample.csv")
    return {f"{split}.{name}": score["value"] for split, metrics in found.items() for name, score in metrics.items()}


def _tell(events: Events, split: str, done: int) -> None:
    events.progress(phase="score", split=split, done=done, total=DRAWS)


def read(task_type: TaskType, file: Path, labels: Sequence[str]) -> Predictions:
    """What training.programs.predict wrote of a split."""
    return task_type.metric_inputs(pq.read_table(file), labels)


def scores(names: Sequence[str], predicted: Predictions, tell: Callable[[int], None] = lambda done: None) -> Scores:
    """The metrics of these rows, each with its interval; `tell` hears how many draws are done."""
    from training.evaluation import bootstrap, metrics
    from training.evaluation.metrics.bootstrap_figures import figures

    values = metrics.compute(names, predicted)
    of_draws = bootstrap.draw_figures(list(figures(names, predicted).values()), len(predicted), DRAWS, SEED, tell)
    return {
        name: {"value": _or_null(value), **_interval(drawn)}
        for (name, value), drawn in zip(values.items(), of_draws, strict=True)
    }


def _interval(drawn: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float | None]:
    known = drawn[np.isfinite(drawn)]
    ends = np.quantile(known, ENDS) if len(known) else (math.nan, math.nan)
    # Where a sum is rounded hangs on the machine; what is left of it tells nothing of a draw.
    return {name: _or_null(float(f"{end:.6g}")) for name, end in zip(("low", "high"), ends, strict=True)}


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _sliced(
    split: str, predicted: Predictions, whole: Scores, job: Job, folder: Path, events: Events
) -> dict[str, Slice]:
    """The groups of each slice that the split has, with their figures; those shown are drawn into the folder."""
    from training.evaluation import plots

    settings = ScoreSettings.model_validate(job.settings)
    found: dict[str, Slice] = {}
    for name in settings.slices:
        if not (groups := _groups(name, split, predicted, job)):
            events.warning(f"{split} has no column {name!r}, so no groups of it.")
            continue
        shown = slices.largest(groups, settings.most_groups, settings.named.get(name, ()))
        every = name in settings.each
        if len(shown) < len(groups):
            kept = f"only the largest and those that floors name have {'intervals' if every else 'figures'}"
            events.warning(f"{name} has {len(groups):,} groups in {split}: {kept}, {len(shown)} in all.")
        many = {group for group, rows in shown.items() if len(rows) >= settings.fewest_rows}
        tell = partial(_tell_groups, events, split)
        found[name] = of_groups(groups if every else shown, many, predicted, whole, settings.metrics, tell)
        plots.draw_slice(name, split, [group for group in found[name] if group["group"] in shown], whole, folder)
    return found


def _tell_groups(events: Events, split: str, done: int, total: int) -> None:
    events.progress(phase="slices", split=split, done=done, total=total)


def _groups(name: str, split: str, predicted: Predictions, job: Job) -> dict[str, slices.Rows]:
    if name == LABEL:
        return slices.of_label(predicted.references, predicted.labels) if isinstance(predicted, OneLabel) else {}
    if name == LENGTH:
        rows = pq.read_table(Path(job.inputs["predictions"], f"{split}.parquet"), columns=["tokens"])
        return slices.of_length(rows["tokens"].to_numpy())
    return slices.of_column(Path(job.inputs["data"], f"{split}.slices.arrow"), name)


def of_groups(
    groups: Mapping[str, slices.Rows],
    intervals: Container[str],
    predicted: Predictions,
    whole: Scores,
    names: Sequence[str],
    tell: Callable[[int, int], None],
) -> Slice:
    """These groups with the figures that the whole split has; `intervals` are the groups whose figures have them.
    `tell` hears how many draws are done, and of how many: a group counts as DRAWS with intervals and without."""
    from training.evaluation import metrics

    made = metrics.make(names, predicted)
    found: Slice = []
    for place, (group, rows) in enumerate(groups.items()):

        def tell_group(done: int, before: int = place * DRAWS) -> None:
            tell(before + done, len(groups) * DRAWS)

        known = scores_of_group(made, predicted.take(rows), group in intervals, tell_group)
        found.append(
            {"group": group, "rows": len(rows), "metrics": {figure: known.get(figure, NOTHING) for figure in whole}}
        )
    return found


def scores_of_group(
    made: Mapping[str, evaluate.Metric],
    predicted: Predictions,
    intervals: bool,
    tell: Callable[[int], None] = lambda done: None,
) -> Scores:
    """The metrics of these rows; one that refuses them has no figure. Only the project's own have an interval."""
    from training.evaluation import metrics

    bootstrapped = [name for name in made if intervals and name in metrics.known(predicted)]
    found: Scores = {}
    if bootstrapped:
        found = scores(bootstrapped, predicted, tell)
    else:
        tell(DRAWS)
    for name, metric in made.items():
        if name not in bootstrapped:
            with contextlib.suppress(ValueError, ArithmeticError, UserError):
                for figure, value in metrics.computed({name: metric}, predicted).items():
                    found[figure] = {**NOTHING, "value": _or_null(value)}
    return found


def worst_rows(split: str, predicted: Predictions, data: Path) -> list[dict[str, Any]]:
    """The SAMPLE_ROWS rows with the poorest answers, worst first."""
    worst = np.argsort(predicted.row_scores, kind="stable")[:SAMPLE_ROWS]
    rows = zip(worst.tolist(), inputs_of(data, worst), strict=True)
    return [
        {"split": split, "row": number, **inputs, **predicted.describe_row(number, inputs)} for number, inputs in rows
    ]


def inputs_of(data: Path, rows: np.ndarray[Any, np.dtype[np.int64]]) -> list[dict[str, Any]]:
    """What the model is given of these rows of a split, as load_data stored it."""
    every = pa.ipc.open_file(pa.memory_map(str(data))).read_all()
    names = [name for name in every.column_names if name != "label"]
    return list(every.select(names).take(rows).to_pylist())


def write_samples(samples: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Rows as CSV, the header from the first of them; an empty file for none."""
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, fieldnames=list(samples[0]) if samples else [])
        writer.writeheader()
        writer.writerows(samples)


if __name__ == "__main__":
    run_program(main)
