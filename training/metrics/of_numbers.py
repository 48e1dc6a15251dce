"""Metrics of numbers, by scipy and scikit-learn: (N,) predictions and (N,) references, such as ratings from 1 to 5."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats
from sklearn import metrics

from training.metrics.base import NumberMetric


class Pearson(NumberMetric):
    """The linear correlation of predictions and labels, as numbers. It has no value where all of either are alike.
    From -1 to 1, by SciPy's pearsonr."""

    def _compute(self, predictions: Any, references: Any, **_: Any) -> dict[str, float]:
        return {"pearson": _correlation(stats.pearsonr, predictions, references)}


class Spearman(NumberMetric):
    """The correlation of the ranks of predictions and labels, as numbers. It has no value where all of either are
    alike. From -1 to 1, by SciPy's spearmanr."""

    def _compute(self, predictions: Any, references: Any, **_: Any) -> dict[str, float]:
        return {"spearman": _correlation(stats.spearmanr, predictions, references)}


class Mse(NumberMetric):
    """The mean of the squared differences of predictions and labels, as numbers. From 0 up, by scikit-learn's
    mean_squared_error."""

    def _compute(self, predictions: Any, references: Any, **_: Any) -> dict[str, float]:
        return {"mse": float(metrics.mean_squared_error(references, predictions))}


class Mae(NumberMetric):
    """The mean of the differences of predictions and labels, as numbers, signs left out. From 0 up, by scikit-learn's
    mean_absolute_error."""

    def _compute(self, predictions: Any, references: Any, **_: Any) -> dict[str, float]:
        return {"mae": float(metrics.mean_absolute_error(references, predictions))}


def _correlation(correlate: Callable[..., Any], predictions: npt.ArrayLike, references: npt.ArrayLike) -> float:
    alike = np.ptp(predictions) == 0 or np.ptp(references) == 0
    return math.nan if alike else float(correlate(references, predictions).statistic)
