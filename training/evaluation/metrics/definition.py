"""Base classes of metrics, by their inputs, and these inputs from predictions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from training.evaluation.predictions import Counts, Figure, Floats, Predictions
from training.jobs.search_path import hide_package
from training.problems import UserError

# evaluate imports transformers for its evaluators, which are not used here: 5 of the import's 7 seconds.
with hide_package("transformers"):
    import evaluate as evaluate  # other modules import it from here
    from datasets import Features, List, Value

MULTILABEL = "multilabel"
"""The `config_name` of rows with any number of labels."""


class LabelMetric(evaluate.Metric):
    """A metric of label indices: subclasses define `_compute(predictions, references) -> {name: number}`, both (N,).

    If rows have any number of labels, `config_name` is "multilabel", and both are (N, L): 1 for a label that a row has,
    else 0. evaluate's `compute` passes lists then.
    """

    _given: ClassVar[dict[str, Any]] = {"predictions": Value("int64"), "references": Value("int64")}

    @classmethod
    def describe(cls) -> str:
        """The metric's definition, in the reference page: by default the docstring."""
        return " ".join((inspect.getdoc(cls) or "").split())

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        """The metric on many draws of these rows at once. None, the default: it is computed for each draw."""
        return None

    def remark(self, predictions: Predictions) -> str:
        """Words on how the metric reads these rows, if they need to be known; they follow its name and a colon."""
        return ""

    @classmethod
    def cost(cls, predictions: Predictions) -> int:
        """Rough time of a row in `bootstrap_figure`, relative to a row in a sum."""
        return 1

    # With this format, evaluate passes floats in single precision, and fails for lists of them.
    _format: ClassVar[str | None] = "numpy"

    def _info(self) -> evaluate.MetricInfo:
        many = self.config_name == MULTILABEL
        given = {name: List(kind) if many and isinstance(kind, Value) else kind for name, kind in self._given.items()}
        return evaluate.MetricInfo(
            description=self.describe(),
            citation="",
            inputs_description="One a row: label indices, or their probabilities, or numbers.",
            features=Features(given),
            format=None if many else self._format,
        )


class ScoreMetric(LabelMetric):
    """A metric of probabilities: subclasses define `_compute(prediction_scores, references) -> {name: number}`.

    The scores are (N, L), the probability of each label; the references (N,) label indices, or (N, L) as above.
    evaluate's `compute` passes both as lists.
    """

    _given: ClassVar[dict[str, Any]] = {"prediction_scores": List(Value("float64")), "references": Value("int64")}
    _format = None


class NumberMetric(LabelMetric):
    """A metric of numbers: subclasses define `_compute(predictions, references) -> {name: number}`, both (N,).

    For a classification they are the labels' names as numbers. evaluate's `compute` passes both as lists.
    """

    _given: ClassVar[dict[str, Any]] = {"predictions": Value("float64"), "references": Value("float64")}
    _format = None


class SumMetric(LabelMetric):
    """A metric that is computed from sums over rows: subclasses define `statistics(**inputs) -> (N, S)`, and
    `of_sums`, from their sums over D sets of rows (D, S) to (D,). All bootstrap draws cost one matrix product."""

    name: ClassVar[str]
    """The name of its number: that in the table of metrics."""

    def statistics(self, *_: Any, **inputs: Any) -> Floats:
        raise NotImplementedError

    def of_sums(self, sums: Floats) -> Floats:
        raise NotImplementedError

    def row_statistics(self, predictions: Predictions) -> Floats | None:
        """(N, S) `statistics` of these rows; None if the metric is not computed from sums."""
        return self.statistics(**inputs_of(self.name, self, predictions))

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        rows = self.row_statistics(predictions)
        return None if rows is None else lambda counts: self.of_sums(counts @ rows)

    def _compute(self, *_: Any, **inputs: Any) -> dict[str, float]:
        own = {feature: inputs[feature] for feature in self._given}  # evaluate's `combine` passes all metrics' features
        sums = self.statistics(**own).sum(axis=0, keepdims=True)
        return {self.name: float(self.of_sums(sums)[0])}


class RatioMetric(SumMetric):
    """A metric that is a sum over rows divided by another one: subclasses define `statistics(**inputs) -> (N, 2)`. It
    has no value where the second sum is 0."""

    def of_sums(self, sums: Floats) -> Floats:
        return share(sums[:, 0], sums[:, 1])


class MeanMetric(RatioMetric):
    """A metric that is the mean of a value of each row: subclasses define `of_rows(**inputs) -> (N,)`."""

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        raise NotImplementedError

    def statistics(self, *_: Any, **inputs: Any) -> Floats:
        values = self.of_rows(**inputs)
        return np.stack([values, np.ones_like(values)], axis=1)


class FeatureMean(MeanMetric):
    """The mean of a feature of the predictions."""

    feature: ClassVar[str]

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls._given = {cls.feature: Value("float64")}

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        return np.asarray(inputs[self.feature], np.float64)


def share(part: Floats, whole: Floats, empty: float = np.nan) -> Floats:
    """part / whole, and `empty` if whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), empty), where=whole > 0)


def undefined(counts: Counts) -> Floats:
    """A figure that is nan on every draw."""
    return np.full(len(counts), np.nan)


def inputs_of(name: str, metric: evaluate.Metric, predicted: Predictions) -> dict[str, Any]:
    """A metric's inputs by feature, from `Predictions.feature_values`. Raises UserError, with the metric's `name`, if
    the predictions lack one."""
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
        raise UserError.of("metrics", "evaluation.metrics", str(error)) from error
    if found is None:
        message = (
            f"{name!r} needs {feature} as {kind}, which {predicted.description} does not have: choose another metric."
        )
        raise UserError.of("metrics", "evaluation.metrics", message)
    return found


def numbers_of(name: str, found: Any) -> dict[str, float]:
    """A metric's result as numbers by name. Raises UserError if it is none."""
    if not isinstance(found, Mapping):
        raise UserError.of(
            "metrics",
            "evaluation.metrics",
            f"{name!r} returned {type(found).__name__}: its `_compute` must return numbers by name.",
        )
    values = {}
    for figure, value in found.items():
        try:
            values[str(figure)] = float(value)
        except (TypeError, ValueError) as error:
            raise UserError.of(
                "metrics",
                "evaluation.metrics",
                f"{name!r} returned {figure!r} as {type(value).__name__}: it must be a number.",
            ) from error
    return values
