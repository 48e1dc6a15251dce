"""Predictions of answers that are parts of a text, with the figures of SQuAD's evaluation script.

N rows. Source of the figures: Rajpurkar et al., SQuAD (arXiv:1606.05250) and Know What You Don't Know
(arXiv:1806.03822), evaluate-v2.0.py; here from 0 to 1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from training.evaluation.predictions import Floats, Predictions

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class ExtractedAnswers(Predictions):
    """The predicted answer to each question, and all true answers. An empty text says that there is no answer."""

    references: npt.NDArray[np.object_]  # (N,) list[str], empty if there is no answer
    predictions: npt.NDArray[np.object_]  # (N,) str

    means: ClassVar = ("f1", "exact_match")
    row_score_name: ClassVar[str] = "f1"

    @property
    def description(self) -> str:
        return "extractive question answering"

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: npt.NDArray[np.int64]) -> ExtractedAnswers:
        return ExtractedAnswers(self.references[rows], self.predictions[rows])

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """The scores of each row; the texts of predictions, and lists of the true answers."""
        if feature in self.means:
            return self.row_scores if feature == "f1" else self._best(exact_match)
        found = {"references": self.references, "predictions": self.predictions}.get(feature)
        return found if dtype == "string" and listed == (feature == "references") else None

    @cached_property
    def row_scores(self) -> Floats:
        """F1."""
        return self._best(f1)

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        right = " | ".join(dict.fromkeys(self.references[row]))
        return {"label": right, "prediction": self.predictions[row], "f1": round(float(self.row_scores[row]), 4)}

    def _best(self, score: Callable[[str, str], float]) -> Floats:
        """(N,) the best score of a prediction with any of the true answers."""
        pairs = zip(self.predictions, self.references, strict=True)
        return np.array([max(score(predicted, right) for right in _known(every)) for predicted, every in pairs], float)


def f1(predicted: str, right: str) -> float:
    """The harmonic mean of precision and recall of words, which white space separates."""
    ours, theirs = normalize(predicted).split(), normalize(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def exact_match(predicted: str, right: str) -> float:
    """1 if the normalized texts are equal."""
    return float(normalize(predicted) == normalize(right))


def normalize(text: str) -> str:
    """The text in lower case, without ASCII's punctuation and English articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _known(answers: list[str]) -> list[str]:
    """The answers that are more than punctuation and articles; the empty one, if there are none."""
    return [answer for answer in answers if normalize(answer)] or [""]
