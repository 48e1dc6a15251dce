"""What metrics are made of: classes of `evaluate` by what they are given, and how that comes from predicted rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from training.evaluation.bootstrap import Counts, Figure
from training.evaluation.predictions import Predictions
from training.jobs.search_path import hide_package
from training.problems import Problem, UserError

# evaluate tries to import it for evaluators that nobody uses here: 5 of the 7 seconds of the import.
with hide_package("transformers"):
    import evaluate as evaluate  # for the others, who would load transformers
    from datasets import Features, List, Value

MULTILABEL = "multilabel"
"""What `evaluate` calls rows with any number of labels."""


class LabelMetric(evaluate.Metric):
    """A metric of label indices: subclasses define `_compute(predictions, references) -> {name: number}`, both (N,).

    Where rows have any number of labels, `config_name` is "multilabel", and both are (N, L): 1 for a label that a row
    has, else 0. Where evaluate's own `compute` is called, they come as lists then.
    """

    _given: ClassVar[dict[str, Any]] = {"predictions": Value("int64"), "references": Value("int64")}

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        """The metric on many draws of these rows at once. None, the default: it is computed on each draw's rows."""
        return None

    @classmethod
    def cost(cls, predictions: Predictions) -> int:
        """Rough time of a row in `bootstrap_figure`, relative to a row in a sum."""
        return 1

    # As arrays evaluate gives numbers in half their precision, and lists of them not at all.
    _format: ClassVar[str | None] = "numpy"

    def _info(self) -> evaluate.MetricInfo:
        many = self.config_name == MULTILABEL
        given = {name: List(kind) if many and isinstance(kind, Value) else kind for name, kind in self._given.items()}
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="One a row: label indices, or their probabilities, or numbers.",
            features=Features(given),
            format=None if many else self._format,
        )


class ScoreMetric(LabelMetric):
    """A metric of probabilities: subclasses define `_compute(prediction_scores, references) -> {name: number}`.

    The scores are (N, L), the probability of each label; the references (N,) label indices, or (N, L) as above. Where
    evaluate's own `compute` is called, both come as lists.
    """

    _given: ClassVar[dict[str, Any]] = {"prediction_scores": List(Value("float64")), "references": Value("int64")}
    _format = None


class NumberMetric(LabelMetric):
    """A metric of numbers: subclasses define `_compute(predictions, references) -> {name: number}`, both (N,).

    Of a classification it is given the labels' names as numbers. Where evaluate's own `compute` is called, both come
    as lists.
    """

    _given: ClassVar[dict[str, Any]] = {"predictions": Value("float64"), "references": Value("float64")}
    _format = None


class SumMetric(LabelMetric):
    """A metric that is made of sums over rows: subclasses define `statistics(**inputs) -> (N, S)`, S numbers a row, and
    `of_sums` of their sums over D sets of rows, (D, S) to (D,). So its interval costs no pass over the rows a draw."""

    name: ClassVar[str]
    """Under which it gives its number."""

    def statistics(self, *_: Any, **inputs: Any) -> npt.NDArray[np.float64]:
        raise NotImplementedError

    def of_sums(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        raise NotImplementedError

    def row_statistics(self, predictions: Predictions) -> npt.NDArray[np.float64] | None:
        """(N, S) `statistics` of these rows. None where the metric is not computed from sums."""
        return self.statistics(**inputs_of(self.name, self, predictions))

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        rows = self.row_statistics(predictions)
        return None if rows is None else lambda counts: self.of_sums(counts @ rows)

    def _compute(self, *_: Any, **inputs: Any) -> dict[str, float]:
        asked = {feature: inputs[feature] for feature in self._given}  # evaluate's `combine` gives all that any takes
        sums = self.statistics(**asked).sum(axis=0, keepdims=True)
        return {self.name: float(self.of_sums(sums)[0])}


class MeanMetric(SumMetric):
    """A metric that is the mean of a figure of each row: subclasses define `of_rows(**inputs) -> (N,)`."""

    def of_rows(self, *_: Any, **inputs: Any) -> npt.NDArray[np.float64]:
        raise NotImplementedError

    def statistics(self, *_: Any, **inputs: Any) -> npt.NDArray[np.float64]:
        found = self.of_rows(**inputs)
        return np.stack([found, np.ones_like(found)], axis=1)

    def of_sums(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(sums[:, 0] / sums[:, 1])


class _MeanGiven(MeanMetric):
    """The mean of what there is of each row under the metric's own name."""

    _format = None

    def of_rows(self, *_: Any, **inputs: Any) -> npt.NDArray[np.float64]:
        return np.asarray(inputs[self.name], np.float64)


def mean_given(name: str) -> type[MeanMetric]:
    """The metric that is the mean of this feature of each row."""
    return type(name, (_MeanGiven,), {"name": name, "_given": {name: Value("float64")}})


def undefined(counts: Counts) -> npt.NDArray[np.float64]:
    """The figure without a value on any draw."""
    return np.full(len(counts), np.nan)


def inputs_of(name: str, metric: evaluate.Metric, predicted: Predictions) -> dict[str, Any]:
    """What a metric is given, by the names and types of its features, as `Predictions.feature_values` has it.

    Raises UserError where that cannot be, naming the metric by `name`.
    """
    features = metric.features[0] if isinstance(metric.features, list) else metric.features
    inputs = {feature: _input(name, feature, features[feature], predicted) for feature in features}
    if metric.format is None and not isinstance(metric, LabelMetric):
        return {feature: values.tolist() for feature, values in inputs.items()}
    return inputs


def _input(name: str, feature: str, kind: Any, predicted: Predictions) -> npt.NDArray[Any]:
    innermost, listed = kind, not isinstance(kind, Value)
    while not isinstance(innermost, Value) and (inside := getattr(innermost, "feature", None)) is not None:
        innermost = inside
    try:
        found = predicted.feature_values(name, feature, getattr(innermost, "dtype", ""), listed)
    except ValueError as error:
        raise refused(str(error)) from error
    if found is None:
        message = (
            f"{name!r} asks for {feature} as {kind}, which {predicted.description} has not: choose another metric."
        )
        raise refused(message)
    return found


def numbers_of(name: str, found: Any) -> dict[str, float]:
    """What a metric computed, each under its own name. Raises UserError where that is no number."""
    if not isinstance(found, Mapping):
        raise refused(f"{name!r} gave {type(found).__name__}: its `_compute` must give a number by name.")
    values = {}
    for figure, value in found.items():
        try:
            values[str(figure)] = float(value)
        except (TypeError, ValueError) as error:
            raise refused(f"{name!r} gave {figure!r} as {type(value).__name__}: it must be a number.") from error
    return values


def refused(message: str) -> UserError:
    """The user's mistake in the list of metrics."""
    return UserError([Problem(kind="metrics", where="evaluation.metrics", message=message)])
