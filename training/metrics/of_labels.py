"""Metrics of label indices, by scikit-learn: (N,) predictions and (N,) references.

A label that is never predicted has precision 0, one that never occurs recall 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy.typing as npt
from sklearn import metrics

from training.metrics.base import LabelMetric

Labels = npt.NDArray[Any]
Average = Literal["macro", "micro", "weighted"]


class Accuracy(LabelMetric):
    """The share of rows whose prediction is right. From 0 to 1, by scikit-learn's accuracy_score."""

    def _compute(self, predictions: Labels, references: Labels, **_: Any) -> dict[str, float]:
        return {"accuracy": float(metrics.accuracy_score(references, predictions))}


class MatthewsCorrelation(LabelMetric):
    """The correlation of predictions and labels: 0 for guesses, however uneven the labels are. From -1 to 1, by
    scikit-learn's matthews_corrcoef."""

    def _compute(self, predictions: Labels, references: Labels, **_: Any) -> dict[str, float]:
        return {"matthews_correlation": float(metrics.matthews_corrcoef(references, predictions))}


class _Averaged(LabelMetric):
    """A figure of each label, made into one."""

    _score: ClassVar[Callable[..., Any]]
    _average: ClassVar[Average | None] = None
    """None: of the label with index 1 where there are two, else macro."""

    def _compute(self, predictions: Labels, references: Labels, **_: Any) -> dict[str, float]:
        average = self._average or self._usual(predictions, references)
        return {self.name: float(type(self)._score(references, predictions, average=average, zero_division=0))}

    def _usual(self, predictions: Labels, references: Labels) -> str:
        if self.config_name == "default":  # as evaluate makes it where nobody says
            return "binary" if max(predictions.max(), references.max()) <= 1 else "macro"
        return "binary" if self.config_name == "binary" else "macro"


class F1(_Averaged):
    """The harmonic mean of precision and recall: of label 1 where there are two labels, else f1_macro. From 0 to 1,
    by scikit-learn's f1_score."""

    _score = staticmethod(metrics.f1_score)


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
    """The share of the rows given a label that have it: of label 1 where there are two, else precision_macro. From
    0 to 1, by scikit-learn's precision_score."""

    _score = staticmethod(metrics.precision_score)


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
    """The share of a label's rows that are given it: of label 1 where there are two, else recall_macro. From 0 to
    1, by scikit-learn's recall_score."""

    _score = staticmethod(metrics.recall_score)


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
