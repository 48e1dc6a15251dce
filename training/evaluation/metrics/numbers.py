"""Metrics of numbers: (N,) predictions and (N,) references, such as ratings from 1 to 5. Equal to scikit-learn's and
SciPy's for finite numbers; they have no value for others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from training.evaluation.metrics.definition import MeanMetric, NumberMetric, SumMetric, inputs_of
from training.evaluation.predictions import Figure, Floats, Predictions

ROUNDING = 1e-13
"""The share of a sum of squares that rounding alone leaves if all numbers are equal."""


class Mse(MeanMetric, NumberMetric):
    """The mean of the squared differences of predictions and labels, as numbers. From 0 up, by scikit-learn's
    mean_squared_error."""

    def of_rows(self, predictions: Any, references: Any) -> Floats:
        return np.asarray((np.asarray(predictions) - np.asarray(references)) ** 2)


class Rmse(Mse):
    """The square root of mse, in the unit of the labels. From 0 up, by scikit-learn's root_mean_squared_error."""

    def of_sums(self, sums: Floats) -> Floats:
        return np.sqrt(super().of_sums(sums))


class Mae(MeanMetric, NumberMetric):
    """The mean of the differences of predictions and labels, as numbers, signs left out. From 0 up, by scikit-learn's
    mean_absolute_error."""

    def of_rows(self, predictions: Any, references: Any) -> Floats:
        return np.abs(np.asarray(predictions) - np.asarray(references))


class R2(SumMetric, NumberMetric):
    """The share of the labels' variance that the predictions explain: 0 where they are no better than the labels' mean,
    below that where they are worse. It has no value where all labels are alike. From minus infinity to 1, by
    scikit-learn's r2_score."""

    def statistics(self, predictions: Any, references: Any) -> Floats:
        label = _centred(references)
        error = np.asarray(predictions) - np.asarray(references)
        return np.stack([error**2, label, label**2, np.ones_like(label)], axis=1)

    def of_sums(self, sums: Floats) -> Floats:
        errors, label, squares, rows = sums.T
        spread = _spread(label, squares, rows)
        return 1 - np.divide(errors, spread, out=np.full(len(sums), np.nan), where=spread > 0)


class Pearson(SumMetric, NumberMetric):
    """The linear correlation of predictions and labels, as numbers. It has no value where all of either are alike.
    From -1 to 1, by SciPy's pearsonr."""

    def statistics(self, predictions: Any, references: Any) -> Floats:
        given, label = _centred(predictions), _centred(references)
        return np.stack([given, label, given**2, label**2, given * label, np.ones_like(given)], axis=1)

    def of_sums(self, sums: Floats) -> Floats:
        given, label, given_squares, label_squares, products, rows = sums.T
        spread = np.sqrt(_spread(given, given_squares, rows)) * np.sqrt(_spread(label, label_squares, rows))
        covariance = products - given * label / rows
        return np.clip(np.divide(covariance, spread, out=np.full(len(sums), np.nan), where=spread > 0), -1, 1)


class Spearman(NumberMetric):
    """The correlation of the ranks of predictions and labels, as numbers. It has no value where all of either are
    alike. From -1 to 1, by SciPy's spearmanr."""

    def _compute(self, predictions: Any, references: Any, **_: Any) -> dict[str, float]:
        constant = np.ptp(predictions) == 0 or np.ptp(references) == 0
        return {self.name: math.nan if constant else float(stats.spearmanr(references, predictions).statistic)}

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        inputs = inputs_of(self.name, self, predictions)
        if not all(np.isfinite(values).all() for values in inputs.values()):
            return None
        predicted, true = (_Ranks(inputs[name]) for name in ("predictions", "references"))
        return lambda counts: np.array(
            [_correlation(predicted.draw(count), true.draw(count), count) for count in counts]
        )

    @classmethod
    def cost(cls, predictions: Predictions) -> int:
        return 10


def _centred(values: Any) -> Floats:
    """The values less their mean, which keeps sums of squares small."""
    numbers = np.asarray(values, dtype=np.float64)
    return np.asarray(numbers - numbers.mean())


def _spread(total: Floats, squares: Floats, rows: Floats) -> Floats:
    """The sum of squared differences from the mean, given the sum and the sum of squares; 0 if all values are equal."""
    spread = squares - total**2 / rows
    return np.where(spread > ROUNDING * squares, spread, 0.0)


def _correlation(first: Floats, second: Floats, count: npt.NDArray[np.int32]) -> float:
    """The correlation of two values (N,) of each row in a draw; nan if all rows have the same one."""
    drawn = count > 0
    if np.ptp(first[drawn]) == 0 or np.ptp(second[drawn]) == 0:
        return math.nan
    x, y = (values - np.average(values, weights=count) for values in (first, second))
    return float(np.clip((count * x * y).sum() / np.sqrt((count * x**2).sum() * (count * y**2).sum()), -1, 1))


class _Ranks:
    """The ranks of numbers in draws of the rows."""

    def __init__(self, values: Floats) -> None:
        distinct, self._place = np.unique(values, return_inverse=True)
        self._distinct = len(distinct)

    def draw(self, count: npt.NDArray[np.int32]) -> Floats:
        """(N,) the ranks in one draw, less a half; the mean rank for equal values."""
        equal = np.bincount(self._place, count, self._distinct)
        return np.asarray((np.cumsum(equal) - equal / 2)[self._place])
