"""Metrics of labels: of rows, by scikit-learn, and of words, by seqeval.

of rows    (N,) label indices as predictions and references; or (N, L) where rows have any number of labels, 1 for each
           that a row has
of words   (N,) lists of the tags' names. With IOB2 tags, spans count: one is right if it has the first word, the last
           word and the type of a true one. With other tags, each word is a span.

A label that occurs and is never predicted has precision 0; in a mean, one that is predicted and never occurs has recall
0. Labels, and rows with any number of them, do not count in a mean if nothing occurs and nothing is predicted. A figure
without anything to count has no value.

N rows, L labels, T types of spans, D sets of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from datasets import List, Value
from sklearn import metrics

from training.evaluation.metrics.definition import LabelMetric, MeanMetric, RatioMetric, SumMetric, share
from training.evaluation.predictions import Counts, Figure, Floats, OneLabel, Predictions
from training.evaluation.tags import Places, count_matches, flatten
from training.recipe.tables.metrics import frequent_positive

Labels = npt.NDArray[Any]


# The arguments: rows with a label, rows predicted to have it, and rows of both.


def precision(true: Floats, predicted: Floats, both: Floats) -> Floats:
    return share(both, predicted, 0.0)


def recall(true: Floats, predicted: Floats, both: Floats) -> Floats:
    return share(both, true, 0.0)


def f1(true: Floats, predicted: Floats, both: Floats) -> Floats:
    return share(2 * both, true + predicted, 0.0)


def pooled(score: Callable[..., Floats], true: Floats, predicted: Floats, both: Floats) -> Floats:
    """The score of one label, or of all together; nan if there is nothing to find."""
    whole = true if score is recall else true + predicted
    return np.where(whole > 0, score(true, predicted, both), np.nan)


class AveragedScore(NamedTuple):
    """A score of one label, which the metrics below average."""

    of_counts: Callable[..., Floats]
    of_rows: Callable[..., Any]
    """Scikit-learn's function."""
    meaning: str
    of_one_row: str
    """Its meaning for the labels of a row."""
    undefined: str
    """Where it has no value, of label 1."""


SCORES = {
    "f1": AveragedScore(
        f1,
        metrics.f1_score,
        "The harmonic mean of precision and recall",
        "of the labels that a row has with those that are predicted",
        "neither occurs nor is predicted",
    ),
    "precision": AveragedScore(
        precision,
        metrics.precision_score,
        "The share of the rows given a label that have it",
        "the share of the labels predicted that the row has; 0 where none is predicted",
        "neither occurs nor is predicted",
    ),
    "recall": AveragedScore(
        recall,
        metrics.recall_score,
        "The share of a label's rows that are given it",
        "the share of the row's labels that are predicted; 0 where it has none",
        "does not occur",
    ),
}


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
            return {self.name: math.nan}
        return {self.name: float(metrics.matthews_corrcoef(references, predictions))}

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        if not isinstance(predictions, OneLabel):
            return None
        confusion = predictions.confusion

        def figure(counts: Counts) -> Floats:
            true, predicted, both = confusion.by_label(counts)
            total = confusion.rows(counts).sum(axis=1)
            covariance = both.sum(axis=1) * total - (true * predicted).sum(axis=1)
            of_labels = total**2 - (true**2).sum(axis=1)
            values = share(covariance, np.sqrt((total**2 - (predicted**2).sum(axis=1)) * of_labels), 0.0)
            return np.where(of_labels > 0, values, np.nan)

        return figure


class LabelAverage(SumMetric):
    """A score as an average over the labels; computed from sums if rows have any number of labels."""

    score: ClassVar[str]
    average: ClassVar[str | None]
    """`macro`, `micro` or `weighted`; None: the label with index 1 of two, else macro."""

    @classmethod
    def describe(cls) -> str:
        of = SCORES[cls.score]
        described = {
            None: f"{of.meaning}: of label 1 where there are two labels, else {cls.score}_macro. It has no value where "
            f"label 1 {of.undefined}.",
            "macro": f"The mean of the labels' {cls.score}, each label counted alike.",
            "micro": f"The {cls.score} over all rows together: where each row has one label, the accuracy.",
            "weighted": f"The mean of the labels' {cls.score}, each counted as often as it occurs.",
        }
        return f"{described[cls.average]} From 0 to 1, by scikit-learn's {cls.score}_score."

    def _compute(self, predictions: Labels, references: Labels, **_: Any) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        if references.ndim == 2:
            return super()._compute(predictions=predictions, references=references)
        average, score = self.average or self._default_average(predictions, references), SCORES[self.score]
        value = float(score.of_rows(references, predictions, average=average, zero_division=0))
        if average == "binary":
            true, predicted = ((side == 1).sum() for side in (references, predictions))
            value = value if np.isfinite(pooled(score.of_counts, true, predicted, np.zeros(()))) else math.nan
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

    def remark(self, predictions: Predictions) -> str:
        """The label that is judged, if it is by far the more frequent one of two."""
        if self.average is not None or not isinstance(predictions, OneLabel):
            return ""
        rows = np.bincount(predictions.references, minlength=len(predictions.labels)).tolist()
        return frequent_positive(dict(zip(predictions.labels, rows, strict=True))) or ""

    def row_statistics(self, predictions: Predictions) -> Floats | None:
        return None if isinstance(predictions, OneLabel) else super().row_statistics(predictions)

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        if not isinstance(predictions, OneLabel):
            return super().bootstrap_figure(predictions)
        return lambda counts: self._of_label_counts(*predictions.confusion.by_label(counts))

    def _of_label_counts(self, true: Floats, predicted: Floats, both: Floats) -> Floats:
        """(D, L) each to (D,)."""
        score = SCORES[self.score].of_counts
        if self.average == "micro":
            return pooled(score, *(part.sum(axis=1) for part in (true, predicted, both)))
        if self.average is None and true.shape[1] == 2:
            return pooled(score, true[:, 1], predicted[:, 1], both[:, 1])
        return weigh(self.average, score(true, predicted, both), true, predicted)


def weigh(average: str | None, scores: Floats, true: Floats, predicted: Floats) -> Floats:
    """(D,) the mean over the labels, macro or weighted, of (D, L) scores; without labels that neither occur nor are
    predicted."""
    weights = true if average == "weighted" else (true + predicted > 0).astype(np.float64)
    return share((scores * weights).sum(axis=1), weights.sum(axis=1))


class RowAverage(RatioMetric):
    """A score as a mean over the rows that have a label or are given one."""

    score: ClassVar[str]

    @classmethod
    def describe(cls) -> str:
        return (
            f"The mean of the rows' {cls.score}: {SCORES[cls.score].of_one_row}. Rows with none on either side do not "
            f"count. From 0 to 1, by scikit-learn's {cls.score}_score."
        )

    def statistics(self, predictions: Labels, references: Labels) -> Floats:
        predicted, true = np.asarray(predictions), np.asarray(references)
        counts = [has.sum(axis=1) for has in (true, predicted, true * predicted)]
        return np.stack([SCORES[self.score].of_counts(*counts), counts[0] + counts[1] > 0], axis=1)


Tags = Sequence[Sequence[str]]
_TAGS: dict[str, Any] = {"predictions": List(Value("string")), "references": List(Value("string"))}


class TagAccuracy(RatioMetric):
    """The share of words whose tag is right. From 0 to 1, by seqeval's accuracy_score."""

    _given = _TAGS
    _format = None

    def statistics(self, **inputs: Any) -> Floats:
        _, true, predicted, rows, number = _encode(**inputs)
        counts = [np.bincount(chosen, minlength=number) for chosen in (rows[true == predicted], rows)]
        return np.stack(counts, axis=1).astype(np.float64)


class SpanAverage(SumMetric):
    """A score as an average over the types of spans."""

    _given = _TAGS
    _format = None

    score: ClassVar[str]
    average: ClassVar[str | None]
    """`macro` or `weighted`; None: all spans together."""

    @classmethod
    def describe(cls) -> str:
        described = {
            "f1": "The harmonic mean of precision and recall, over all spans together. It has no value without spans "
            "on either side.",
            "precision": "The share of predicted spans that are right. It has no value without spans on either side.",
            "recall": "The share of true spans that are found. It has no value without true spans.",
        }[cls.score]
        if cls.average:
            counted = "each type counted alike" if cls.average == "macro" else "each counted as often as it occurs"
            described = f"The mean of {cls.score} over the types of spans, {counted}."
        return f"{described} From 0 to 1, by seqeval's {cls.score}_score."

    def statistics(self, **inputs: Any) -> Floats:
        counts = count_matches(*_encode(**inputs))
        return counts.reshape(len(counts), 3 * counts.shape[1]) if self.average else counts.sum(axis=1)

    def of_sums(self, sums: Floats) -> Floats:
        true, predicted, both = np.moveaxis(sums.reshape(len(sums), sums.shape[1] // 3, 3), 2, 0)
        score = SCORES[self.score].of_counts
        if not self.average:
            return pooled(score, true[:, 0], predicted[:, 0], both[:, 0])
        return weigh(self.average, score(true, predicted, both), true, predicted)


def _encode(predictions: Tags, references: Tags, **_: Any) -> tuple[list[str], Places, Places, Places, int]:
    """All tags that occur; the true and the predicted tag of each word (W,) as indices of these, -1 for none; the row
    (W,) of each word; and the number of rows."""
    true, rows = flatten(references)
    predicted = flatten(predictions)[0]
    tags = sorted({*true, *predicted} - {""})
    places = {tag: place for place, tag in enumerate(tags)} | {"": -1}
    codes = [np.array([places[tag] for tag in given], np.int64) for given in (true, predicted)]
    return tags, codes[0], codes[1], rows, len(references)
