"""Metrics as `evaluate.Metric` classes that need no network: `evaluate.combine` takes them as they are.

A user's metric is a class like these, named in the recipe as `my_metrics:ExactMatch`. It is created with a
`config_name` ("binary", "multiclass", "multilabel" or "regression") and receives the features that it declares:
`predictions` and `references` (label indices, or numbers), or `prediction_scores` (probabilities). LabelMetric,
ScoreMetric and NumberMetric declare these. Every number that it returns is kept under its name.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from training.evaluation.hub_metrics import PREFIX, load_hub_metric
from training.evaluation.metrics.definition import (
    FeatureMean,
    LabelMetric,
    NumberMetric,
    ScoreMetric,
    evaluate,
    inputs_of,
    numbers_of,
)
from training.evaluation.predictions import Predictions
from training.jobs.user_code import CodeField
from training.problems import Problem, UserError, collected, nearest, relocated
from training.recipe.tables.metrics import METRICS

__all__ = [
    "LabelMetric",
    "NumberMetric",
    "ScoreMetric",
    "compute",
    "compute_made",
    "list_known",
    "load_class",
    "make",
    "remarks",
]


def compute(names: Sequence[str], predicted: Predictions) -> dict[str, float]:
    """The values of these metrics; nan where one is undefined for the rows. Raises UserError as `make` does, and if a
    user's metric does not return numbers."""
    return compute_made(make(names, predicted), predicted)


def compute_made(metrics: Mapping[str, evaluate.Metric], predicted: Predictions) -> dict[str, float]:
    """The same from the metrics of `make`, which several groups of rows can use."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        values |= numbers_of(name, metric._compute(**inputs_of(name, metric, predicted)))
    return values


def remarks(names: Sequence[str], predicted: Predictions) -> list[str]:
    """The remarks of the project's metrics on these rows."""
    made = make([name for name in names if name in list_known(predicted)], predicted)
    found: dict[str, list[str]] = {}
    for name, metric in made.items():
        if isinstance(metric, LabelMetric) and (remark := metric.remark(predicted)):
            found.setdefault(remark, []).append(name)
    return [f"{', '.join(named)}: {remark}" for remark, named in found.items()]


def make(names: Sequence[str], predicted: Predictions) -> dict[str, evaluate.Metric]:
    """The metrics by name: one of the table, `module:Class` or `hub:owner/name@COMMIT`.

    Raises UserError for all metrics that do not exist, cannot be created, or do not fit such rows.
    """
    no_rows = predicted.take(np.empty(0, np.int64))
    metrics: dict[str, evaluate.Metric] = {}
    problems: list[Problem] = []
    with tempfile.TemporaryDirectory() as scratch:  # evaluate creates a folder for each metric
        for index, name in enumerate(names):
            with collected(problems), relocated(f"evaluation.metrics[{index}]"):
                found = _class(name, predicted)
                metrics[name] = found(config_name=predicted.config_name, keep_in_memory=True, cache_dir=scratch)
                inputs_of(name, metrics[name], no_rows)
    if problems:
        raise UserError(problems)
    return metrics


def list_known(predicted: Predictions) -> list[str]:
    """The names of the project's metrics for such rows."""
    prediction_type = predicted.prediction_type
    if predicted.means or prediction_type is None:
        return [*(predicted.means or METRICS)]
    return [name for name, metric in METRICS.items() if prediction_type in metric.classes]


def load_class(name: str, prediction_type: str | None) -> type[LabelMetric]:
    """One of the project's metrics: the class in its entry, with its name and parameters as attributes; the first of
    its classes for predictions of a user's class."""
    entry = METRICS[name]
    module, _, attribute = entry.classes.get(prediction_type or "", next(iter(entry.classes.values()))).partition(":")
    found: type[LabelMetric] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return type(name, (found,), {"name": name, **entry.parameters})


def _class(name: str, predicted: Predictions) -> type[evaluate.Metric]:
    names = list_known(predicted)
    if name in names:
        if predicted.means:
            return type(name, (FeatureMean,), {"name": name, "feature": name})
        return load_class(name, predicted.prediction_type)
    if name.startswith(PREFIX):
        return load_hub_metric(name)
    if ":" not in name:
        choices = f"choose from {', '.join(names)}, or name a class as module:Class"
        fault = f"does not fit {predicted.description}" if name in METRICS else "is unknown"
        raise UserError.of("metrics", "evaluation.metrics", f"{name!r} {fault}: {choices}.{nearest(name, names)}")
    found: type[evaluate.Metric] = _FIELD.load(name)
    return found


_FIELD = CodeField(
    kind="metrics",
    where="evaluation.metrics",
    example="my_metrics:ExactMatch",
    accepted="a subclass of evaluate.Metric",
    accepts=lambda found: isinstance(found, type) and issubclass(found, evaluate.Metric),
)
