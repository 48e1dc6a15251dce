"""What metrics are made of: classes of `evaluate` by what they are given, and how that comes from predicted rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from training.absent import absent
from training.predicted import Predicted
from training.problems import Problem, UserError
from training.recipe.release import refusal_of_numbers

# evaluate tries to import it for evaluators that nobody uses here: 5 of the 7 seconds of the import.
with absent("transformers"):
    import evaluate as evaluate  # for the others, who would load transformers
    from datasets import Features, List, Value


class LabelMetric(evaluate.Metric):
    """A metric of label indices: subclasses define `_compute(predictions, references) -> {name: number}`, both (N,)."""

    _given: ClassVar[dict[str, Any]] = {"predictions": Value("int64"), "references": Value("int64")}
    # As arrays evaluate gives numbers in half their precision, and lists of them not at all.
    _format: ClassVar[str | None] = "numpy"

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="One a row: label indices, or their probabilities, or numbers.",
            features=Features(self._given),
            format=self._format,
        )


class ScoreMetric(LabelMetric):
    """A metric of probabilities: subclasses define `_compute(prediction_scores, references) -> {name: number}`.

    The scores are (N, L), the probability of each label; the references (N,) label indices. Where evaluate's own
    `compute` is called, both come as lists.
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


def inputs_of(name: str, metric: evaluate.Metric, predicted: Predicted) -> dict[str, Any]:
    """What a metric is given, by the names and types of its features.

    `predictions` and `references` are label indices where a whole number is asked for, the labels' names where a text
    is, and their names as numbers where a number is; `prediction_scores` are the probabilities (N, L), or (N,) that of
    label 1 where one number a row is asked for. Raises UserError where that cannot be, naming the metric by `name`.
    """
    features = metric.features[0] if isinstance(metric.features, list) else metric.features
    inputs = {feature: _input(name, feature, features[feature], predicted) for feature in features}
    if metric.format is None and not isinstance(metric, LabelMetric):
        return {feature: values.tolist() for feature, values in inputs.items()}
    return inputs


def _input(name: str, feature: str, kind: Any, predicted: Predicted) -> npt.NDArray[Any]:
    single = isinstance(kind, Value)
    if feature == "prediction_scores":
        if not single:
            return predicted.probabilities
        if len(predicted.labels) == 2:
            return predicted.probabilities[:, 1]
    elif feature in ("predictions", "references") and single:
        indices = predicted.predictions if feature == "predictions" else predicted.references
        if kind.dtype.startswith("float"):
            if message := refusal_of_numbers(name, predicted.labels):
                raise refused(message)
            return np.array([float(label) for label in predicted.labels])[indices]
        return np.array(predicted.labels)[indices] if kind.dtype == "string" else indices
    message = f"{name!r} asks for {feature} as {kind}, which a classification with {len(predicted.labels)} labels has "
    raise refused(f"{message}not: choose another metric.")


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
