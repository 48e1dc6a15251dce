"""Every metric as a Figure: on many draws of the same rows at once, without going through the rows again for each.

Most metrics hang on how many rows of each true label got which prediction: those of a draw are counted once for all of
them. N rows, D draws, K pairs of a true and a predicted label that occur, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from training.evaluation.bootstrap import Figure
from training.evaluation.metrics import compute, make
from training.evaluation.metrics.definition import SumMetric, evaluate, inputs_of, numbers_of
from training.evaluation.metrics.labels import f1, precision, recall, share
from training.evaluation.metrics.probabilities import BINS, calibration
from training.evaluation.predictions import ManyLabels, Numbers, OneLabel, Predictions

Counts = npt.NDArray[np.int32]  # (D, N) how often each row counts in each draw
Floats = npt.NDArray[np.float64]


def figures(names: Sequence[str], predicted: Predictions) -> dict[str, Figure]:
    """The figure of each metric, under the names that `metrics.compute` gives them and in that order.

    A name of METRICS has the figure of that name; a metric of the user's or of the Hub has one for each number that it
    returns. nan where a draw's rows leave a metric undefined, such as correlations where all predictions are alike.
    Raises UserError as `metrics.compute` does.
    """
    known = _known(names, predicted)
    found: dict[str, Figure] = {}
    for name, metric in make(names, predicted).items():
        if name in known:
            found[name] = known[name]
        elif isinstance(metric, SumMetric):
            found[name] = partial(_of_sums, metric, metric.statistics(**inputs_of(name, metric, predicted)))
        else:
            found |= _repeated(name, metric, predicted)
    return found


def cost(name: str, predicted: Predictions) -> int:
    """Time of a row in a draw of this metric's figure, relative to a row in a sum, roughly."""
    if name == "roc_auc" and isinstance(predicted, OneLabel | ManyLabels):  # one curve for each label
        return 1 if isinstance(predicted, OneLabel) and len(predicted.labels) == 2 else len(predicted.labels)
    return 10 if name == "spearman" else 1


def influences(name: str, predicted: Predictions) -> Floats | None:
    """(N,) how much each row moves a metric that is made of sums: its value less the value without the row. None for
    other metrics."""
    (metric,) = make([name], predicted).values()
    if name in _known([name], predicted) or not isinstance(metric, SumMetric):
        return None
    rows = metric.statistics(**inputs_of(name, metric, predicted))
    sums = rows.sum(axis=0, keepdims=True)
    return np.asarray(metric.of_sums(sums) - metric.of_sums(sums - rows))


def _of_sums(metric: SumMetric, statistics: Floats, counts: Counts) -> Floats:
    return metric.of_sums(counts @ statistics)


def _known(names: Sequence[str], predicted: Predictions) -> dict[str, Figure]:
    """The figures that are neither made of sums nor need the rows of each draw."""
    match predicted:
        case OneLabel():
            return _of_one_label(names, predicted)
        case ManyLabels() if np.isfinite(predicted.probabilities).all():
            return {"roc_auc": _roc_auc_of_many(predicted)} if "roc_auc" in names else {}
        case Numbers() if np.isfinite(predicted.predictions).all():
            return {"spearman": _spearman_of_numbers(predicted)} if "spearman" in names else {}
    return {}


def _of_one_label(names: Sequence[str], predicted: OneLabel) -> dict[str, Figure]:
    pairs, known = _Pairs(predicted), bool(np.isfinite(predicted.probabilities).all())
    found: dict[str, Figure] = {name: partial(_of_pairs, pairs, _OF_PAIRS[name]) for name in names if name in _OF_PAIRS}
    for name in (name for name in names if name in _OF_PROBABILITIES):
        found[name] = _OF_PROBABILITIES[name](predicted) if known else _undefined
    return found


def _undefined(counts: Counts) -> Floats:
    return np.full(len(counts), np.nan)


# Metrics of pairs


class _Pairs:
    """The pairs of a true and a predicted label that occur, and how many rows of each are in a draw."""

    def __init__(self, predicted: OneLabel) -> None:
        self.labels = predicted.labels
        codes = predicted.references * len(self.labels) + predicted.predictions
        self._order = np.argsort(codes, kind="stable")
        pairs, self._starts = np.unique(codes[self._order], return_index=True)
        self.true, self.predicted = np.divmod(pairs, len(self.labels))  # (K,) each
        self._last: tuple[Counts, Floats] | None = None

    def rows(self, counts: Counts) -> Floats:
        """(D, K)"""
        if self._last is None or self._last[0] is not counts:  # one metric after the other asks for the same
            rows = np.add.reduceat(np.take(counts, self._order, axis=1), self._starts, axis=1, dtype=np.int64)
            self._last = counts, rows.astype(np.float64)
        return self._last[1]

    def of_label(self, rows: Floats) -> tuple[Floats, Floats, Floats]:
        """(D, L) rows that have a label, rows predicted to have it, and rows of both."""
        label = np.arange(len(self.labels))
        true, predicted = ((which[:, None] == label).astype(np.float64) for which in (self.true, self.predicted))
        return rows @ true, rows @ predicted, rows @ (true * predicted)

    def numbers(self) -> tuple[Floats, Floats]:
        """(K,) the true and the predicted labels as numbers."""
        numbers = np.array([float(label) for label in self.labels])
        return numbers[self.true], numbers[self.predicted]


def _of_pairs(pairs: _Pairs, metric: Callable[[_Pairs, Floats], Floats], counts: Counts) -> Floats:
    return metric(pairs, pairs.rows(counts))


def _matthews(pairs: _Pairs, rows: Floats) -> Floats:
    true, predicted, both = pairs.of_label(rows)
    total = rows.sum(axis=1)
    covariance = both.sum(axis=1) * total - (true * predicted).sum(axis=1)
    variances = (total**2 - (predicted**2).sum(axis=1)) * (total**2 - (true**2).sum(axis=1))
    return share(covariance, np.sqrt(variances))


def _averaged(score: Callable[[Floats, Floats, Floats], Floats], average: str, pairs: _Pairs, rows: Floats) -> Floats:
    true, predicted, both = pairs.of_label(rows)
    if average == "micro":
        return score(*(part.sum(axis=1) for part in (true, predicted, both)))
    scores = score(true, predicted, both)
    if not average and len(pairs.labels) == 2:
        return scores[:, 1]
    # A label that occurs on neither side does not count.
    weights = true if average == "weighted" else (true + predicted > 0).astype(np.float64)
    return (scores * weights).sum(axis=1) / weights.sum(axis=1)


def _spearman(pairs: _Pairs, rows: Floats) -> Floats:
    true, predicted = pairs.numbers()
    return _correlation(_ranks(true, rows), _ranks(predicted, rows), rows)


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


_SCORES = {"f1": f1, "precision": precision, "recall": recall}
_OF_PAIRS: dict[str, Callable[[_Pairs, Floats], Floats]] = {
    **{
        f"{name}_{average}" if average else name: partial(_averaged, score, average)
        for name, score in _SCORES.items()
        for average in ("", "macro", "micro", "weighted")
    },
    "matthews_correlation": _matthews,
    "spearman": _spearman,
}


# Metrics of probabilities


def _calibration_error(predicted: OneLabel) -> Figure:
    bins, gaps = calibration(predicted.probabilities, predicted.references)
    of_bin = np.where(bins[:, None] == np.arange(BINS), gaps[:, None], 0.0)  # (N, bins)
    return lambda counts: np.abs(counts @ of_bin).sum(axis=1) / counts.sum(axis=1)


def _roc_auc(predicted: OneLabel) -> Figure:
    labels = [1] if len(predicted.labels) == 2 else range(len(predicted.labels))
    ordered = [_Ordered(predicted.probabilities[:, label], predicted.references == label) for label in labels]
    return lambda counts: np.mean([one.area(counts) for one in ordered], axis=0)


def _roc_auc_of_many(predicted: ManyLabels) -> Figure:
    columns = zip(predicted.probabilities.T, predicted.references.T, strict=True)
    ordered = [_Ordered(scores, has) for scores, has in columns]

    def figure(counts: Counts) -> Floats:
        areas = np.array([one.area(counts) for one in ordered])  # (L, D)
        there = np.isfinite(areas)
        judged = there.sum(axis=0)
        total = np.where(there, areas, 0.0).sum(axis=0)
        return np.divide(total, judged, out=np.full(len(counts), np.nan), where=judged > 0)

    return figure


class _Ordered:
    """Rows by the probability of one label: the area under its ROC curve is the share of pairs of a row that has the
    label and one that has not in which the former's is higher, half where they are equal (Mann and Whitney, 1947)."""

    def __init__(self, scores: Floats, has: npt.NDArray[np.bool_]) -> None:
        self._order = np.argsort(scores, kind="stable")
        rising, self._has = scores[self._order], np.flatnonzero(has[self._order])
        self._below = np.searchsorted(rising, rising[self._has], side="left")  # rows with less, and with no more
        self._through = np.searchsorted(rising, rising[self._has], side="right")

    def area(self, counts: Counts) -> Floats:
        """(D,), nan where all rows of a draw have the label, or none."""
        drawn = np.take(counts, self._order, axis=1)
        up_to = np.zeros((len(drawn), drawn.shape[1] + 1), np.int32)
        np.cumsum(drawn, axis=1, dtype=np.int32, out=up_to[:, 1:])
        having = drawn[:, self._has].astype(np.int64)
        with_it = having.sum(axis=1)
        # Among the rows that have the label, each pair counts a half from either side.
        twice = (having * (up_to[:, self._below] + up_to[:, self._through])).sum(axis=1) - with_it**2
        pairs = with_it * (up_to[:, -1] - with_it)
        return np.divide(twice, 2 * pairs, out=np.full(len(counts), np.nan), where=pairs > 0)


_OF_PROBABILITIES: dict[str, Callable[[OneLabel], Figure]] = {
    "calibration_error": _calibration_error,
    "roc_auc": _roc_auc,
}


# Ranks of numbers


def _spearman_of_numbers(predicted: Numbers) -> Figure:
    ranked = [_Ranked(predicted.predictions), _Ranked(predicted.references)]

    def of_draw(count: npt.NDArray[np.int32]) -> float:
        first, second = (one.ranks(count)[None, :] for one in ranked)
        return float(_correlation(first, second, count[None, :].astype(np.float64))[0])

    return lambda counts: np.array([of_draw(count) for count in counts])


class _Ranked:
    """Rows by a number of each."""

    def __init__(self, values: Floats) -> None:
        different, self._place = np.unique(values, return_inverse=True)
        self._different = len(different)

    def ranks(self, count: npt.NDArray[np.int32]) -> Floats:
        """(N,) in one draw, less a half; the mean one where values are equal."""
        equal = np.bincount(self._place, count, self._different)
        return np.asarray((np.cumsum(equal) - equal / 2)[self._place])


# Others


def _repeated(name: str, metric: evaluate.Metric, predicted: Predictions) -> dict[str, Figure]:
    """The figures of a metric of which only its code is known: it is given each draw's rows, repeated. One that
    refuses the rows of a draw has no value there."""
    last: list[Any] = [None, []]

    def of_draw(count: npt.NDArray[np.int32]) -> dict[str, float]:
        rows = np.repeat(np.arange(len(predicted)), count)
        try:
            return numbers_of(name, metric._compute(**inputs_of(name, metric, predicted.take(rows))))
        except (ValueError, ArithmeticError):
            return {}

    def figure(of: str, counts: Counts) -> Floats:
        if last[0] is not counts:  # the figures of one metric are computed together
            last[:] = counts, [of_draw(count) for count in counts]
        return np.array([found.get(of, np.nan) for found in last[1]])

    return {of: partial(figure, of) for of in compute([name], predicted)}
