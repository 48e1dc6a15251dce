"""Metrics of label indices, by scikit-learn: (N,) predictions and (N,) references; or (N, L) where rows have any number
of labels, 1 for each that a row has.

A label that occurs and is never predicted has precision 0; in a mean, one that is predicted and never occurs has recall
0. Labels, and rows with any number of them, do not count in a mean if nothing occurs and nothing is predicted. A figure
without anything to count has no value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from training.evaluation.confusion import Counts, Figure
from training.evaluation.metrics.definition import LabelMetric, MeanMetric, SumMetric
from training.evaluation.predictions import OneLabel, Predictions

Labels = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Average = Literal["macro", "micro", "weighted"]


# The arguments: rows with a label, rows predicted to have it, and rows of both.


def share(part: Floats, whole: Floats, empty: float = 0.0) -> Floats:
    """part / whole, and `empty` if whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), empty), where=whole > 0)


def precision(true: Floats, predicted: Floats, both: Floats) -> Floats:
    return share(both, predicted)


def recall(true: Floats, predicted: Floats, both: Floats) -> Floats:
    return share(both, true)


def f1(true: Floats, predicted: Floats, both: Floats) -> Floats:
    return share(2 * both, true + predicted)


def pooled(score: Callable[..., Floats], true: Floats, predicted: Floats, both: Floats) -> Floats:
    """The score of one label, or of all together; nan if there is nothing to find."""
    whole = true if score is recall else true + predicted
    return np.where(whole > 0, score(true, predicted, both), np.nan)


class Accuracy(MeanMetric):
    """The share of rows whose prediction is right: where rows have any number of labels, all of them and no other. From
    0 to 1, by scikit-learn's accuracy_score."""

    def of_rows(self, predictions: Labels, references: Labels) -> Floats:
        same = np.asarray(predictions) == np.asarray(references)
        return (same.all(axis=1) if same.ndim == 2 else same).astype(np.float64)


class HammingLoss(MeanMetric):
    """The share of labels, over all rows, that are predicted and not there, or there and not predicted. From 0 to 1, by
    scikit-learn's hamming_loss."""

    def of_rows(self, predictions: Labels, references: Labels) -> Floats:
        return np.asarray((np.asarray(predictions) != np.asarray(references)).mean(axis=1))


class MatthewsCorrelation(LabelMetric):
    """The correlation of predictions and labels: 0 for guesses, however uneven the labels are. It has no value where
    all rows have the same label. From -1 to 1, by scikit-learn's matthews_corrcoef."""

    def _compute(self, predictions: Labels, references: Labels, **_: Any) -> dict[str, float]:
        if len(np.unique(references)) < 2:
            return {"matthews_correlation": math.nan}
        return {"matthews_correlation": float(metrics.matthews_corrcoef(references, predictions))}

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        if not isinstance(predictions, OneLabel):
            return None
        confusion = predictions.confusion

        def figure(counts: Counts) -> Floats:
            true, predicted, both = confusion.by_label(counts)
            total = confusion.rows(counts).sum(axis=1)
            covariance = both.sum(axis=1) * total - (true * predicted).sum(axis=1)
            of_labels = total**2 - (true**2).sum(axis=1)
            values = share(covariance, np.sqrt((total**2 - (predicted**2).sum(axis=1)) * of_labels))
            return np.where(of_labels > 0, values, np.nan)

        return figure


class _Averaged(SumMetric):
    """An average over the labels; computed from sums if rows have any number of labels."""

    _score: ClassVar[Callable[..., Any]]
    _of_counts: ClassVar[Callable[..., Floats]]
    _average: ClassVar[Average | None] = None
    """None: the label with index 1 of two, else macro."""

    def _compute(self, predictions: Labels, references: Labels, **_: Any) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        if references.ndim == 2:
            return super()._compute(predictions=predictions, references=references)
        average = self._average or self._default_average(predictions, references)
        value = float(type(self)._score(references, predictions, average=average, zero_division=0))
        if average == "binary":
            true, predicted = ((side == 1).sum() for side in (references, predictions))
            value = value if np.isfinite(pooled(type(self)._of_counts, true, predicted, np.zeros(()))) else math.nan
        return {self.name: value}

    def _default_average(self, predictions: Labels, references: Labels) -> str:
        if self.config_name == "default":  # evaluate's default
            return "binary" if max(predictions.max(), references.max()) <= 1 else "macro"
        return "binary" if self.config_name == "binary" else "macro"

    def statistics(self, predictions: Labels, references: Labels) -> Floats:
        return np.concatenate([references, predictions, references * predictions], axis=1).astype(np.float64)

    def of_sums(self, sums: Floats) -> Floats:
        counts = np.split(sums, 3, axis=1)  # (D, L) each
        return self._of_label_counts(*counts)

    def row_statistics(self, predictions: Predictions) -> Floats | None:
        return None if isinstance(predictions, OneLabel) else super().row_statistics(predictions)

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        if not isinstance(predictions, OneLabel):
            return super().bootstrap_figure(predictions)
        return lambda counts: self._of_label_counts(*predictions.confusion.by_label(counts))

    def _of_label_counts(self, true: Floats, predicted: Floats, both: Floats) -> Floats:
        """(D, L) each to (D,)."""
        if self._average == "micro":
            return pooled(type(self)._of_counts, *(part.sum(axis=1) for part in (true, predicted, both)))
        if self._average is None and true.shape[1] == 2:
            return pooled(type(self)._of_counts, true[:, 1], predicted[:, 1], both[:, 1])
        scores = type(self)._of_counts(true, predicted, both)
        weights = true if self._average == "weighted" else (true + predicted > 0).astype(np.float64)
        return share((scores * weights).sum(axis=1), weights.sum(axis=1), np.nan)


class _SampleAverage(SumMetric):
    """A mean over the rows that have a label or are given one."""

    _of_counts: ClassVar[Callable[..., Floats]]

    def statistics(self, predictions: Labels, references: Labels) -> Floats:
        predicted, true = np.asarray(predictions), np.asarray(references)
        counts = [has.sum(axis=1) for has in (true, predicted, true * predicted)]
        return np.stack([type(self)._of_counts(*counts), counts[0] + counts[1] > 0], axis=1)

    def of_sums(self, sums: Floats) -> Floats:
        return share(sums[:, 0], sums[:, 1], np.nan)


class F1(_Averaged):
    """The harmonic mean of precision and recall: of label 1 where there are two labels, else f1_macro. It has no value
    where label 1 neither occurs nor is predicted. From 0 to 1, by scikit-learn's f1_score."""

    _score = staticmethod(metrics.f1_score)
    _of_counts = staticmethod(f1)


class F1Macro(F1):
    """The mean of the labels' f1, each label counted alike. From 0 to 1, by scikit-learn's f1_score."""

    _average = "macro"


class F1Micro(F1):
    """f1 over all rows together: where each row has one label, the accuracy. From 0 to 1, by scikit-learn's
    f1_score."""

    _average = "micro"


class F1Weighted(F1):
    """The mean of the labels' f1, each counted as often as it occurs. From 0 to 1, by scikit-learn's f1_score."""

    _average = "weighted"


class Precision(_Averaged):
    """The share of the rows given a label that have it: of label 1 where there are two, else precision_macro. It has no
    value where label 1 neither occurs nor is predicted. From 0 to 1, by scikit-learn's precision_score."""

    _score = staticmethod(metrics.precision_score)
    _of_counts = staticmethod(precision)


class PrecisionMacro(Precision):
    """The mean of the labels' precision, each label counted alike. From 0 to 1, by scikit-learn's
    precision_score."""

    _average = "macro"


class PrecisionMicro(Precision):
    """Precision over all rows together: where each row has one label, the accuracy. From 0 to 1, by scikit-learn's
    precision_score."""

    _average = "micro"


class PrecisionWeighted(Precision):
    """The mean of the labels' precision, each counted as often as it occurs. From 0 to 1, by scikit-learn's
    precision_score."""

    _average = "weighted"


class Recall(_Averaged):
    """The share of a label's rows that are given it: of label 1 where there are two, else recall_macro. It has no value
    where label 1 does not occur. From 0 to 1, by scikit-learn's recall_score."""

    _score = staticmethod(metrics.recall_score)
    _of_counts = staticmethod(recall)


class RecallMacro(Recall):
    """The mean of the labels' recall, each label counted alike. From 0 to 1, by scikit-learn's recall_score."""

    _average = "macro"


class RecallMicro(Recall):
    """Recall over all rows together: where each row has one label, the accuracy. From 0 to 1, by scikit-learn's
    recall_score."""

    _average = "micro"


class RecallWeighted(Recall):
    """The mean of the labels' recall, each counted as often as it occurs. From 0 to 1, by scikit-learn's
    recall_score."""

    _average = "weighted"


class F1Samples(_SampleAverage):
    """The mean of the rows' f1, of the labels that a row has with those that are predicted. Rows with none on either
    side do not count. From 0 to 1, by scikit-learn's f1_score."""

    _of_counts = staticmethod(f1)


class PrecisionSamples(_SampleAverage):
    """The mean of the rows' precision: the share of the labels predicted that the row has; 0 where none is predicted.
    Rows with none on either side do not count. From 0 to 1, by scikit-learn's precision_score."""

    _of_counts = staticmethod(precision)


class RecallSamples(_SampleAverage):
    """The mean of the rows' recall: the share of the row's labels that are predicted; 0 where it has none. Rows with
    none on either side do not count. From 0 to 1, by scikit-learn's recall_score."""

    _of_counts = staticmethod(recall)
