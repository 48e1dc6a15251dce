"""Metrics as `evaluate.Metric` classes that need no network: `evaluate.combine` takes them as they are.

f1, precision and recall are those of the label with index 1 where there are two labels ("binary"), and the
unweighted mean over the labels where there are more ("multiclass"). A label that is never predicted has
precision 0, one that never occurs recall 0.

A metric of your own is a class like these, named in the recipe by where it is: `my_metrics:ExactMatch`. It is
made with a `config_name` ("binary" or "multiclass"), called with predictions and references (label indices),
and every number that it returns is kept under its name.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics as sklearn_metrics

from training.problems import Problem, UserError, nearest


@contextmanager
def _without_transformers() -> Iterator[None]:
    """Make `import transformers` fail inside, unless it is there already.

    evaluate tries it for evaluators that nobody uses here, and it would be 5 of the 7 seconds of the import.
    """
    hidden = "transformers" not in sys.modules
    if hidden:
        sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["transformers"]


with _without_transformers():
    import evaluate
    from datasets import Features, Value

METRICS: dict[str, str] = {
    "accuracy": "training.metrics:Accuracy",
    "f1": "training.metrics:F1",
    "precision": "training.metrics:Precision",
    "recall": "training.metrics:Recall",
}
"""A metric's name in the recipe and where its class is."""


def compute(
    names: Sequence[str],
    predictions: npt.NDArray[np.int64],
    references: npt.NDArray[np.int64],
    labels: Sequence[str],
) -> dict[str, float]:
    """The named metrics of (N,) predicted and (N,) true label indices.

    A name is one of METRICS or `module:Class`. Raises UserError naming every metric that cannot be found.
    """
    config = "binary" if len(labels) == 2 else "multiclass"
    classes = _find(names)
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:  # evaluate makes a folder a metric, used or not
        for metric_class in classes:
            metric = metric_class(config_name=config, keep_in_memory=True, cache_dir=scratch)
            found = metric.compute(predictions=predictions, references=references)
            values |= {name: float(value) for name, value in found.items()}
    return values


def _find(names: Sequence[str]) -> list[type[evaluate.Metric]]:
    classes, problems = [], []
    for name in names:
        module, _, attribute = METRICS.get(name, name).partition(":")
        try:
            classes.append(getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError, ValueError) as error:
            message = (
                f"evaluation.metrics={name!r} is unknown ({error}): choose from {', '.join(METRICS)}, "
                f"or name a class as module:Class.{nearest(name, METRICS)}"
            )
            problems.append(Problem(kind="metrics", where="evaluation.metrics", message=message))
    if problems:
        raise UserError(problems)
    return classes


class LabelMetric(evaluate.Metric):
    """A metric of label indices: subclasses define `_compute(predictions, references) -> {name: number}`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="Label indices, one a row.",
            features=Features({"predictions": Value("int64"), "references": Value("int64")}),
            format="numpy",
        )

    def _average(self, predictions: npt.NDArray[Any], references: npt.NDArray[Any]) -> str:
        if self.config_name == "default":
            return "binary" if max(predictions.max(), references.max()) <= 1 else "macro"
        return "binary" if self.config_name == "binary" else "macro"


class Accuracy(LabelMetric):
    """The share of rows whose prediction is right."""

    def _compute(self, predictions: npt.NDArray[Any], references: npt.NDArray[Any]) -> dict[str, float]:
        return {"accuracy": float(sklearn_metrics.accuracy_score(references, predictions))}


class F1(LabelMetric):
    """The harmonic mean of precision and recall."""

    def _compute(self, predictions: npt.NDArray[Any], references: npt.NDArray[Any]) -> dict[str, float]:
        average = self._average(predictions, references)
        return {"f1": float(sklearn_metrics.f1_score(references, predictions, average=average, zero_division=0))}


class Precision(LabelMetric):
    """The share of the rows predicted to have a label that do have it."""

    def _compute(self, predictions: npt.NDArray[Any], references: npt.NDArray[Any]) -> dict[str, float]:
        average = self._average(predictions, references)
        score = sklearn_metrics.precision_score(references, predictions, average=average, zero_division=0)
        return {"precision": float(score)}


class Recall(LabelMetric):
    """The share of the rows that have a label and are predicted to have it."""

    def _compute(self, predictions: npt.NDArray[Any], references: npt.NDArray[Any]) -> dict[str, float]:
        average = self._average(predictions, references)
        score = sklearn_metrics.recall_score(references, predictions, average=average, zero_division=0)
        return {"recall": float(score)}
