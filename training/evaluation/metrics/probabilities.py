"""Metrics of probabilities: (N, L) prediction_scores and (N,) references, or (N, L) where rows have any number of
labels. Scores that are no numbers have none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from training.evaluation.metrics.definition import MeanMetric, ScoreMetric
from training.evaluation.predictions import log_losses

BINS = 15
"""Of the calibration error, equally wide."""


class RocAuc(ScoreMetric):
    """How likely a row of a label gets a higher probability of it than a row of another: of label 1 where there are
    two, else the mean over the labels, each against the rest. It has no value where a label does not occur; where rows
    have any number of labels, those that no row has, or all have, are left out. From 0 to 1, by scikit-learn's
    roc_auc_score."""

    def _compute(self, prediction_scores: Any, references: Any, **_: Any) -> dict[str, float]:
        scores, labels = np.asarray(prediction_scores), np.asarray(references)
        if labels.ndim == 2:
            return {"roc_auc": self._of_many(scores, labels)}
        every = range(scores.shape[1])
        if len(np.unique(labels)) < len(every) or not np.isfinite(scores).all():
            return {"roc_auc": math.nan}
        if len(every) == 2:
            return {"roc_auc": float(metrics.roc_auc_score(labels, scores[:, 1]))}
        return {"roc_auc": float(metrics.roc_auc_score(labels, scores, multi_class="ovr", labels=every))}

    def _of_many(self, scores: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> float:
        judged = np.flatnonzero(np.ptp(labels, axis=0)) if len(labels) else ()
        if not len(judged) or not np.isfinite(scores).all():
            return math.nan
        return float(np.mean([metrics.roc_auc_score(labels[:, label], scores[:, label]) for label in judged]))


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
            return {"calibration_error": math.nan}
        bins, gaps = calibration(scores, np.asarray(references))
        return {"calibration_error": float(np.abs(np.bincount(bins, weights=gaps, minlength=BINS)).sum() / len(gaps))}


def calibration(
    scores: npt.NDArray[np.float64], references: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """(N,) the bin of each row, and (N,) how far it is off: 1 where its prediction is right, less that one's
    probability."""
    confidence = scores.max(axis=1)
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence, side="left")  # a bin has its upper end
    return bins, (scores.argmax(axis=1) == references) - confidence
