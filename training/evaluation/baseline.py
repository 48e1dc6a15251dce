"""The baseline: the best constant prediction, or another rival, which a first model must beat.

The metric decides which constant is best: on rows of which 30 % are spam, "never spam" has the better accuracy and
"always spam" the better F1. It is chosen on the training rows, never on the evaluated ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from training.evaluation.constant_predictions import Baseline, Rival
from training.evaluation.metrics import compute, list_known
from training.evaluation.metrics.resampling import figures
from training.evaluation.predictions import Figure, Predictions
from training.recipe.tables.metrics import METRICS, more_is_better

ROUNDING = 1e-12
"""Largest difference of equal figures."""


def choose_rival(baseline: Baseline, metric: str) -> Rival:
    """The rival with the best value of this metric on the training rows; the first of equal ones, and for a metric
    that is not the project's."""
    train = baseline.train
    if train is None or metric not in list_known(train):
        return baseline.rivals[0]
    counts = np.ones(len(train)) if baseline.counts is None else baseline.counts
    found = [
        figures([metric], rival.predict(train, "train"))[metric](counts[None].astype(np.int32))[0]
        for rival in baseline.rivals
    ]
    values = np.array(found) * (1 if more_is_better(metric) else -1)
    values = np.where(np.isfinite(values), values, -np.inf)
    return baseline.rivals[int(np.argmax(values >= values.max() - ROUNDING))]


def compute_values(metrics: Sequence[str], predicted: Predictions) -> dict[str, float]:
    """The figures of these metrics for a rival's predictions, without those of a user's metric that fails on them."""
    found: dict[str, float] = {}
    for metric in metrics:
        with contextlib.suppress(Exception):  # a user's metric may raise anything
            found |= compute([metric], predicted)
    return {name: _constant_value(name) if np.isnan(value) else value for name, value in found.items()}


def fill_undefined(name: str, figure: Figure) -> Figure:
    """The figure on draws of rows, with the value of `compute_values` on draws where equal predictions leave it nan."""
    value = _constant_value(name)
    return figure if np.isnan(value) else lambda counts: np.nan_to_num(figure(counts), nan=value)


def _constant_value(name: str) -> float:
    """The value of a metric that is undefined for equal predictions; nan for other metrics."""
    value = METRICS[name].constant_value if name in METRICS else None
    return np.nan if value is None else value
