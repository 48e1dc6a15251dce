"""Metrics of numbers: (N,) predictions and (N,) references, such as ratings from 1 to 5. Equal to scikit-learn's and
SciPy's, but where the numbers are not finite: there they have no value."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy import stats

from training.evaluation.confusion import Confusion, Counts, Figure, Floats
from training.evaluation.metrics.definition import MeanMetric, NumberMetric, SumMetric
from training.evaluation.predictions import Numbers, OneLabel, Predictions

ROUNDING = 1e-13
"""The share of a sum of squares that is left of it by rounding alone where all numbers are alike."""


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
    below that where they are worse. It has no value on a single row. From minus infinity to 1, by scikit-learn's
    r2_score."""

    name: ClassVar[str] = "r2"

    def statistics(self, predictions: Any, references: Any) -> Floats:
        label = _centred(references)
        error = np.asarray(predictions) - np.asarray(references)
        return np.stack([error**2, label, label**2, np.ones_like(label)], axis=1)

    def of_sums(self, sums: Floats) -> Floats:
        errors, label, squares, rows = sums.T
        spread = _spread(label, squares, rows)
        alike = np.where(errors == 0, 1.0, 0.0 * errors)  # as scikit-learn has it where all labels are alike
        found = 1 - np.divide(errors, spread, out=1 - alike, where=spread > 0)
        return np.where(rows < 2, np.nan, found)


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
        alike = np.ptp(predictions) == 0 or np.ptp(references) == 0
        return {"spearman": math.nan if alike else float(stats.spearmanr(references, predictions).statistic)}

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        match predictions:
            case OneLabel():
                return partial(_spearman_of_labels, predictions.confusion)
            case Numbers() if np.isfinite(predictions.predictions).all():
                given, true = _Ranked(predictions.predictions), _Ranked(predictions.references)
                return lambda counts: np.array([_spearman_of_draw(given, true, count) for count in counts])
        return None

    @classmethod
    def cost(cls, predictions: Predictions) -> int:
        return 10


def _centred(values: Any) -> Floats:
    """So that sums of squares are of the size of what they differ by."""
    numbers = np.asarray(values, dtype=np.float64)
    return np.asarray(numbers - numbers.mean())


def _spread(total: Floats, squares: Floats, rows: Floats) -> Floats:
    """The sum of the squared differences from the mean, given the sum and the sum of squares; 0 where all are alike."""
    spread = squares - total**2 / rows
    return np.where(spread > ROUNDING * squares, spread, 0.0)


def _spearman_of_labels(confusion: Confusion, counts: Counts) -> Floats:
    rows, (true, predicted) = confusion.rows(counts), confusion.numbers()
    return _correlation(_ranks(true, rows), _ranks(predicted, rows), rows)


def _spearman_of_draw(predicted: _Ranked, true: _Ranked, count: npt.NDArray[np.int32]) -> float:
    first, second = (one.ranks(count)[None, :] for one in (predicted, true))
    return float(_correlation(first, second, count[None, :].astype(np.float64))[0])


def _ranks(values: Floats, rows: Floats) -> Floats:
    """(K,) values to (D, K) ranks less a half, which no correlation sees; the mean one where values are equal."""
    different, place = np.unique(values, return_inverse=True)
    equal = rows @ (place[:, None] == np.arange(len(different))).astype(np.float64)
    return (np.cumsum(equal, axis=1) - equal / 2)[:, place]


def _correlation(first: Floats, second: Floats, rows: Floats) -> Floats:
    """(D,) of two values (D, K) a pair; nan where all rows have the same one."""
    total = rows.sum(axis=1, keepdims=True)
    off = [values - (values * rows).sum(axis=1, keepdims=True) / total for values in (first, second)]
    covariance = (rows * off[0] * off[1]).sum(axis=1)
    spread = np.sqrt((rows * off[0] ** 2).sum(axis=1)) * np.sqrt((rows * off[1] ** 2).sum(axis=1))
    alike = [
        np.where(rows > 0, values, -np.inf).max(axis=1) == np.where(rows > 0, values, np.inf).min(axis=1)
        for values in (first, second)
    ]
    known = ~(alike[0] | alike[1])
    return np.clip(np.divide(covariance, spread, out=np.full(len(rows), np.nan), where=known), -1, 1)


class _Ranked:
    """Rows by a number of each."""

    def __init__(self, values: Floats) -> None:
        different, self._place = np.unique(values, return_inverse=True)
        self._different = len(different)

    def ranks(self, count: npt.NDArray[np.int32]) -> Floats:
        """(N,) in one draw, less a half; the mean one where values are equal."""
        equal = np.bincount(self._place, count, self._different)
        return np.asarray((np.cumsum(equal) - equal / 2)[self._place])
