"""Metrics of words' tags: (N,) lists of the tags' names as predictions and references, as in seqeval.

With IOB2 tags, spans count: one is right if it has the first word, the last word and the type of a true one. With other
tags, each word is a span. N rows, T types of spans, D sets of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from datasets import List, Value

from training.evaluation.metrics.definition import SumMetric
from training.evaluation.metrics.labels import Average, Floats, f1, pooled, precision, recall, share
from training.evaluation.tags import Places, count_matches, flatten

Tags = Sequence[Sequence[str]]


class TagMetric(SumMetric):
    """A metric of tags: subclasses define `statistics` of predictions and references, and `of_sums`."""

    _given: ClassVar[dict[str, Any]] = {"predictions": List(Value("string")), "references": List(Value("string"))}
    _format = None


class TagAccuracy(TagMetric):
    """The share of words whose tag is right. From 0 to 1, by seqeval's accuracy_score."""

    name = "accuracy"

    def statistics(self, **inputs: Any) -> Floats:
        _, true, predicted, rows, number = _encode(**inputs)
        counts = [np.bincount(chosen, minlength=number) for chosen in (rows[true == predicted], rows)]
        return np.stack(counts, axis=1).astype(np.float64)

    def of_sums(self, sums: Floats) -> Floats:
        return share(sums[:, 0], sums[:, 1], np.nan)


class _OfSpans(TagMetric):
    """An average over the types of spans."""

    _score: ClassVar[Callable[..., Floats]]
    _average: ClassVar[Average] = "micro"

    def statistics(self, **inputs: Any) -> Floats:
        counts = count_matches(*_encode(**inputs))
        return counts.sum(axis=1) if self._average == "micro" else counts.reshape(len(counts), 3 * counts.shape[1])

    def of_sums(self, sums: Floats) -> Floats:
        true, predicted, both = np.moveaxis(sums.reshape(len(sums), sums.shape[1] // 3, 3), 2, 0)
        if self._average == "micro":
            return pooled(type(self)._score, true[:, 0], predicted[:, 0], both[:, 0])
        scores = type(self)._score(true, predicted, both)
        # A type that neither occurs nor is predicted does not count.
        weights = true if self._average == "weighted" else (true + predicted > 0).astype(np.float64)
        return share((scores * weights).sum(axis=1), weights.sum(axis=1), np.nan)


class SpanF1(_OfSpans):
    """The harmonic mean of precision and recall, over all spans together. It has no value without spans on either side.
    From 0 to 1, by seqeval's f1_score."""

    name = "f1"
    _score = staticmethod(f1)


class SpanF1Macro(SpanF1):
    """The mean of f1 over the types of spans, each type counted alike. From 0 to 1, by seqeval's f1_score."""

    name, _average = "f1_macro", "macro"


class SpanF1Weighted(SpanF1):
    """The mean of f1 over the types of spans, each counted as often as it occurs. From 0 to 1, by seqeval's
    f1_score."""

    name, _average = "f1_weighted", "weighted"


class SpanPrecision(_OfSpans):
    """The share of predicted spans that are right. It has no value without spans on either side. From 0 to 1, by
    seqeval's precision_score."""

    name = "precision"
    _score = staticmethod(precision)


class SpanPrecisionMacro(SpanPrecision):
    """The mean of precision over the types of spans, each type counted alike. From 0 to 1, by seqeval's
    precision_score."""

    name, _average = "precision_macro", "macro"


class SpanPrecisionWeighted(SpanPrecision):
    """The mean of precision over the types of spans, each counted as often as it occurs. From 0 to 1, by seqeval's
    precision_score."""

    name, _average = "precision_weighted", "weighted"


class SpanRecall(_OfSpans):
    """The share of true spans that are found. It has no value without true spans. From 0 to 1, by seqeval's
    recall_score."""

    name = "recall"
    _score = staticmethod(recall)


class SpanRecallMacro(SpanRecall):
    """The mean of recall over the types of spans, each type counted alike. From 0 to 1, by seqeval's recall_score."""

    name, _average = "recall_macro", "macro"


class SpanRecallWeighted(SpanRecall):
    """The mean of recall over the types of spans, each counted as often as it occurs: recall itself. From 0 to 1, by
    seqeval's recall_score."""

    name, _average = "recall_weighted", "weighted"


def _encode(predictions: Tags, references: Tags, **_: Any) -> tuple[list[str], Places, Places, Places, int]:
    """All tags that occur; the true and the predicted tag of each word (W,) as indices of these, -1 for none; the row
    (W,) of each word; and the number of rows."""
    true, rows = flatten(references)
    predicted = flatten(predictions)[0]
    tags = sorted({*true, *predicted} - {""})
    places = {tag: place for place, tag in enumerate(tags)} | {"": -1}
    codes = [np.array([places[tag] for tag in given], np.int64) for given in (true, predicted)]
    return tags, codes[0], codes[1], rows, len(references)
