"""Metrics on many bootstrap draws at once.

N rows, D draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from training.evaluation.metrics import compute, list_known, load_class, make
from training.evaluation.metrics.definition import LabelMetric, SumMetric, evaluate, inputs_of, numbers_of
from training.evaluation.predictions import Counts, Figure, Floats, Predictions


def figures(names: Sequence[str], predicted: Predictions) -> dict[str, Figure]:
    """The figures of the metrics, by the names and in the order of `metrics.compute`.

    A metric with a `bootstrap_figure` has one figure; another metric has one for each number that it returns. A figure
    is nan on draws that leave the metric undefined, such as correlations of equal predictions. Raises UserError as
    `metrics.compute` does.
    """
    found: dict[str, Figure] = {}
    for name, metric in make(names, predicted).items():
        figure = metric.bootstrap_figure(predicted) if isinstance(metric, LabelMetric) else None
        found |= _figures_by_repetition(name, metric, predicted) if figure is None else {metric.name: figure}
    return found


def cost(name: str, predicted: Predictions) -> int:
    """Rough time of a row in a draw of this metric's figure, relative to a row in a sum."""
    if predicted.means or name not in list_known(predicted):
        return 1
    return load_class(name, predicted.prediction_type).cost(predicted)


def influences(name: str, predicted: Predictions) -> Floats | None:
    """(N,) the influence of each row on a metric that is computed from sums: its value less the value without the row.
    None for other metrics."""
    (metric,) = make([name], predicted).values()
    if not isinstance(metric, SumMetric) or (rows := metric.row_statistics(predicted)) is None:
        return None
    sums = rows.sum(axis=0, keepdims=True)
    return np.asarray(metric.of_sums(sums) - metric.of_sums(sums - rows))


def _figures_by_repetition(name: str, metric: evaluate.Metric, predicted: Predictions) -> dict[str, Figure]:
    """The figures of a metric that is computed on each draw's rows, repeated; nan if it refuses them."""
    last: list[Any] = [None, []]

    def of_draw(count: npt.NDArray[np.int32]) -> dict[str, float]:
        rows = np.repeat(np.arange(len(predicted)), count)
        try:
            return numbers_of(name, metric._compute(**inputs_of(name, metric, predicted.take(rows))))
        except (ValueError, ArithmeticError):
            return {}

    def figure(number: str, counts: Counts) -> Floats:
        if last[0] is not counts:  # the figures of one metric are computed together
            last[:] = counts, [of_draw(count) for count in counts]
        return np.array([found.get(number, np.nan) for found in last[1]])

    return {number: partial(figure, number) for number in compute([name], predicted)}
