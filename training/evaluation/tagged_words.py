"""Predictions of a tag for each word.

N rows, W words of all rows, one row's after the other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from training.evaluation.predictions import Predictions, Rows, log_losses
from training.evaluation.tags import find_row_spans, is_iob2
from training.recipe.tables.metrics import TAGS

_MAX_LOSS = -np.log(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Tagged(Predictions):
    """A tag for each word."""

    references: Rows  # (W,) true tags, as indices of `labels`
    predictions: Rows  # (W,) -1 for a word without prediction if there is no tag O
    probabilities: npt.NDArray[np.float64]  # (W,) of the predicted tag; nan if the model did not see the word
    starts: Rows  # (N + 1,) the first word of each row, then W
    labels: Sequence[str]

    prediction_type: ClassVar = TAGS
    row_score_name: ClassVar[str] = "neg_log_loss"

    @property
    def description(self) -> str:
        return f"a classification of words with {len(self.labels)} tags"

    @property
    def caveat(self) -> str | None:
        """The number of words that the model did not see."""
        unseen = int(np.isnan(self.probabilities).sum())
        if not unseen:
            return None
        return (
            f"{unseen:,} of {len(self.references):,} words have no prediction: they are beyond tokens.max_length, or "
            "the tokenizer drops them. They count as O, or as wrong if there is no such tag."
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def rows(self) -> Rows:
        """(W,) the row of each word."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def take(self, rows: Rows) -> Tagged:
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        words = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], lengths)
        return Tagged(self.references[words], self.predictions[words], self.probabilities[words], starts, self.labels)

    def concatenate(self, other: Tagged) -> Tagged:
        return Tagged(
            np.concatenate([self.references, other.references]),
            np.concatenate([self.predictions, other.predictions]),
            np.concatenate([self.probabilities, other.probabilities]),
            np.concatenate([self.starts, self.starts[-1] + other.starts[1:]]),
            self.labels,
        )

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """(N,) lists of a row's tags: names as strings, indices as integers."""
        if feature not in ("predictions", "references") or not listed or dtype.startswith("float"):
            return None
        tags = self.predictions if feature == "predictions" else self.references
        found = (np.array([*self.labels, ""], object)[tags] if dtype == "string" else tags).tolist()
        return np.fromiter((found[start:end] for start, end in pairwise(self.starts)), object, len(self))

    @property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """The mean log loss of the row's words that the model saw, negated: of the predicted tag's probability, given
        whether that tag is right."""
        seen = ~np.isnan(self.probabilities)
        losses = log_losses(self.probabilities[seen], self._hits[seen])
        sums = np.bincount(self.rows[seen], losses, len(self))
        words = np.bincount(self.rows[seen], minlength=len(self))
        return -np.divide(sums, words, out=np.full(len(self), _MAX_LOSS), where=words > 0)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """Whether all tags of the row are right."""
        return np.bincount(self.rows[~self._hits], minlength=len(self)) == 0

    @property
    def codes(self) -> tuple[Rows, Rows]:
        """Tags of the words."""
        return self.references, self.predictions

    @property
    def _hits(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.predictions == self.references)

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """`[PER Angela Merkel] [LOC Rome]` for spans; `They/PRON fish/VERB` if every word has a tag."""
        tagged, words = self.take(np.array([row])), inputs["text"]
        wrong = int((~tagged._hits).sum())
        return {
            "label": _format_tags(tagged.references, words, self.labels),
            "prediction": _format_tags(tagged.predictions, words, self.labels),
            "wrong_tags": wrong,
        }


def _format_tags(tags: Rows, words: Sequence[str], labels: Sequence[str]) -> str:
    if not is_iob2(labels):
        names = [*labels, ""]
        return " ".join(f"{word}/{names[tag]}" for word, tag in zip(words, tags.tolist(), strict=True))
    return " ".join(
        f"[{kind} {' '.join(words[start:end])}]" for kind, start, end in find_row_spans(labels, tags.tolist())
    )
