"""Metrics of words' tags: (N,) lists of the tags' names as predictions and references, as in seqeval.

With IOB2 tags, spans count: one is right if it has the first word, the last word and the type of a true one. With other
tags, each word is a span. N rows, T types of spans, D sets of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from datasets import List, Value

from training.evaluation.metrics.definition import SumMetric
from training.evaluation.metrics.labels import SCORES, Floats, pooled, share, weigh
from training.evaluation.tags import Places, count_matches, flatten

Tags = Sequence[Sequence[str]]


class TagMetric(SumMetric):
    """A metric of tags: subclasses define `statistics` of predictions and references, and `of_sums`."""

    _given: ClassVar[dict[str, Any]] = {"predictions": List(Value("string")), "references": List(Value("string"))}
    _format = None


class TagAccuracy(TagMetric):
    """The share of words whose tag is right. From 0 to 1, by seqeval's accuracy_score."""

    def statistics(self, **inputs: Any) -> Floats:
        _, true, predicted, rows, number = _encode(**inputs)
        counts = [np.bincount(chosen, minlength=number) for chosen in (rows[true == predicted], rows)]
        return np.stack(counts, axis=1).astype(np.float64)

    def of_sums(self, sums: Floats) -> Floats:
        return share(sums[:, 0], sums[:, 1], np.nan)


class SpanAverage(TagMetric):
    """A score as an average over the types of spans."""

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
