"""Metrics of probabilities: (N, L) prediction_scores and (N,) references, or (N, L) if rows have any number of labels.
They are undefined for scores that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from training.evaluation.calibration import BINS, bins_of, calibration_error
from training.evaluation.metrics.definition import MeanMetric, ScoreMetric, undefined
from training.evaluation.predictions import Counts, Figure, Floats, ManyLabels, OneLabel, Predictions, log_losses


class RocAuc(ScoreMetric):
    """How likely a row of a label gets a higher probability of it than a row of another: of label 1 where there are
    two, else the mean over the labels, each against the rest. It has no value where a label does not occur; where rows
    have any number of labels, those that no row has, or all have, are left out. From 0 to 1, by scikit-learn's
    roc_auc_score."""

    def _compute(self, prediction_scores: Any, references: Any, **_: Any) -> dict[str, float]:
        scores, labels = np.asarray(prediction_scores), np.asarray(references)
        if labels.ndim == 2:
            return {self.name: self._of_many(scores, labels)}
        every = range(scores.shape[1])
        if len(np.unique(labels)) < len(every) or not np.isfinite(scores).all():
            return {self.name: math.nan}
        if len(every) == 2:
            return {self.name: float(metrics.roc_auc_score(labels, scores[:, 1]))}
        return {self.name: float(metrics.roc_auc_score(labels, scores, multi_class="ovr", labels=every))}

    def _of_many(self, scores: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> float:
        judged = np.flatnonzero(np.ptp(labels, axis=0)) if len(labels) else ()
        if not len(judged) or not np.isfinite(scores).all():
            return math.nan
        return float(np.mean([metrics.roc_auc_score(labels[:, label], scores[:, label]) for label in judged]))

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        match predictions:
            case OneLabel():
                places = [1] if len(predictions.labels) == 2 else range(len(predictions.labels))
                has = [predictions.references == place for place in places]
                if not np.isfinite(predictions.probabilities).all():
                    return undefined
                curves = [
                    RocCurve(predictions.probabilities[:, place], had) for place, had in zip(places, has, strict=True)
                ]
                return lambda counts: np.mean([curve.area(counts) for curve in curves], axis=0)
            case ManyLabels() if np.isfinite(predictions.probabilities).all():
                columns = zip(predictions.probabilities.T, predictions.references.T, strict=True)
                return partial(_mean_area, [RocCurve(scores, has) for scores, has in columns])
        return None

    @classmethod
    def cost(cls, predictions: Predictions) -> int:
        """The number of curves: one for each label, and one for two labels."""
        labels = len(predictions.labels) if isinstance(predictions, OneLabel | ManyLabels) else 1
        return 1 if isinstance(predictions, OneLabel) and labels == 2 else labels


class LogLoss(MeanMetric, ScoreMetric):
    """The mean of -ln(p), p the probability that a row's true label got; where rows have any number of labels, p the
    probability of what is true of each label, the mean over all labels of all rows. From 0 up, by scikit-learn's
    log_loss."""

    def of_rows(self, prediction_scores: Any, references: Any) -> npt.NDArray[np.float64]:
        scores, labels = np.asarray(prediction_scores), np.asarray(references)
        if labels.ndim == 2:
            return np.asarray(log_losses(scores, labels == 1).mean(axis=1))
        true = scores[np.arange(len(labels)), labels]
        return log_losses(true, np.ones(len(labels), np.bool_))


class CalibrationError(ScoreMetric):
    """The expected calibration error: how far the probability of the predicted label is from how often it is right, in
    15 equally wide bins of that probability, weighted by their rows. Drawn rows make it larger, so its interval may lie
    above the value. From 0 to 1, as in Guo et al., On Calibration of Modern Neural Networks (2017)."""

    def _compute(self, prediction_scores: Any, references: Any, **_: Any) -> dict[str, float]:
        scores = np.asarray(prediction_scores)
        if not np.isfinite(scores).all():
            return {self.name: math.nan}
        return {self.name: calibration_error(scores.max(axis=1), scores.argmax(axis=1) == np.asarray(references))}

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        if not isinstance(predictions, OneLabel):
            return None
        if not np.isfinite(predictions.probabilities).all():
            return undefined
        bins, gaps = calibration(predictions.probabilities, predictions.references)
        by_bin = np.where(bins[:, None] == np.arange(BINS), gaps[:, None], 0.0)  # (N, bins)
        return lambda counts: np.abs(counts @ by_bin).sum(axis=1) / counts.sum(axis=1)


def calibration(
    scores: npt.NDArray[np.float64], references: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """(N,) the bin of each row, and (N,) its gap: 1 if its prediction is right, else 0, less the probability."""
    confidence = scores.max(axis=1)
    return bins_of(confidence), (scores.argmax(axis=1) == references) - confidence


def _mean_area(curves: Sequence[RocCurve], counts: Counts) -> Floats:
    """(D,) the mean over the labels that some but not all rows of a draw have; nan without such a label."""
    areas = np.array([curve.area(counts) for curve in curves])  # (L, D)
    defined = np.isfinite(areas)
    number, total = defined.sum(axis=0), np.where(defined, areas, 0.0).sum(axis=0)
    return np.divide(total, number, out=np.full(len(counts), np.nan), where=number > 0)


class RocCurve:
    """The ROC curve of one label on draws of rows.

    The area under it is the share of pairs, of a row with the label and a row without, in which the former has the
    higher probability; equal ones count half (Mann and Whitney, 1947).
    """

    def __init__(self, scores: Floats, has: npt.NDArray[np.bool_]) -> None:
        self._order = np.argsort(scores, kind="stable")
        rising, self._has = scores[self._order], np.flatnonzero(has[self._order])
        # Rows with a lower score, and rows with at most this score.
        self._below = np.searchsorted(rising, rising[self._has], side="left")
        self._through = np.searchsorted(rising, rising[self._has], side="right")

    def area(self, counts: Counts) -> Floats:
        """(D,) nan if all rows of a draw have the label, or none."""
        drawn = np.take(counts, self._order, axis=1)
        up_to = np.zeros((len(drawn), drawn.shape[1] + 1), np.int32)
        np.cumsum(drawn, axis=1, dtype=np.int32, out=up_to[:, 1:])
        having = drawn[:, self._has].astype(np.int64)
        with_it = having.sum(axis=1)
        # Among the rows that have the label, each pair counts a half from either side.
        twice = (having * (up_to[:, self._below] + up_to[:, self._through])).sum(axis=1) - with_it**2
        pairs = with_it * (up_to[:, -1] - with_it)
        return np.divide(twice, 2 * pairs, out=np.full(len(counts), np.nan), where=pairs > 0)
