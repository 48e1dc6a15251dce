"""The rows that a person should look at: a threshold on the probability of a prediction, above which the model errs at
most so often; and sets of labels, one of which is right with a given chance.

The threshold comes from Learn then Test (Angelopoulos et al., 2021), on two samples of rows that share none:

validation   proposes. A label has a threshold of its own if enough rows are predicted to have it; the others share one.
             For each of these groups, the candidates are quantiles of the validation rows' probabilities, and the first
             to be tested is the one that promises most. All of this is fixed before a row of the other sample is seen,
             so the model's checkpoint and its temperature may come from the same rows.
test         decides. From the first candidate on to lower ones (fixed-sequence testing), each is tested by the exact
             binomial test of Clopper and Pearson, and the last one before the first that fails is taken. Each of G
             groups has the error level (1 - confidence) / G.

So with the confidence, on all future rows like these, no group errs more often than `max_error` among its answered
rows: for any number of rows, any ties, and probabilities however wrong. Conformal risk control would bound only the
mean over many such models; a model that is released is one.

N rows, L labels, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

CANDIDATES = 50
"""Thresholds that are tried at most: those that answer 2 %, 4 %, …, 100 % of a group's validation rows."""
OWN_THRESHOLD = 4
"""A label has its own threshold if so many times the fewest rows that can pass are expected of it."""


@dataclass(frozen=True)
class LabelThreshold:
    """The rows with one predicted label, or with any of those that have no group of their own; their threshold, and
    the rows that decided."""

    label: int | None
    """None: all labels that no other group has."""
    threshold: float | None
    """Rows are answered whose probability is at least this; None: no row is."""
    answered: int
    """Rows of the test sample."""
    errors: int
    """Of these."""
    rows: int
    """The group's rows of the test sample."""
    at_most: float | None
    """Upper bound of the share of errors among answered rows."""


@dataclass(frozen=True)
class Judged:
    """Predictions of rows whose labels are known."""

    probability: Floats  # (N,) that the prediction is right
    label: Rows  # (N,) the predicted label; 0 if a row has any number of them
    right: Mask  # (N,)

    def __len__(self) -> int:
        return len(self.right)

    def take(self, rows: Mask) -> Judged:
        """The rows of a mask."""
        return Judged(self.probability[rows], self.label[rows], self.right[rows])


def fewest_rows(max_error: float, level: float) -> int:
    """The fewest answered rows, all of them right, that pass."""
    return math.ceil(math.log(level) / math.log1p(-max_error))


def find_thresholds(proposing: Judged, deciding: Judged, max_error: float, confidence: float) -> list[LabelThreshold]:
    """The groups, with their thresholds. `proposing` and `deciding` share no rows."""
    labels = _divide(proposing, len(deciding), max_error, 1 - confidence)
    level, found = (1 - confidence) / len(labels), list[LabelThreshold]()
    for label in labels:
        first, second = (one.take(in_group(one.label, label, labels)) for one in (proposing, deciding))
        found.append(_find_threshold(label, first, second, max_error, level))
    return found


def in_group(predicted: Rows, label: int | None, labels: Sequence[int | None]) -> Mask:
    """(N,) whether the row belongs to the group of a label, among the groups of these labels, from its prediction."""
    own = [one for one in labels if one is not None]
    return np.asarray(~np.isin(predicted, own) if label is None else predicted == label)


def needs_review(probability: Floats, label: Rows, own: Mapping[int, float | None], others: float | None) -> Mask:
    """(N,) whether a person should look at the row, from its predicted label and the label's probability.

    `own` are the thresholds of labels that have one, `others` that of all others; None: no row is answered.
    """
    threshold = np.full(len(label), math.inf if others is None else others)
    for one, value in own.items():
        threshold[label == one] = math.inf if value is None else value
    return np.asarray(~(probability >= threshold))


def least_probability(true_probabilities: Floats, coverage: float) -> float:
    """The probability from which a label belongs to a row's set, given the (N,) probabilities of the true labels of
    rows that the model has not seen. 0, so that every label does, if there are too few rows.

    A set has the true label of a further row with a chance of at least `coverage`, over the draw of these rows too
    (split conformal prediction with the score of Sadinle et al., Least Ambiguous Set-Valued Classifiers, 2019).
    """
    rows = len(true_probabilities)
    left_out = math.floor((rows + 1) * (1 - coverage) + 1e-9)
    return float(np.sort(true_probabilities)[left_out - 1]) if left_out else 0.0


def risk_coverage(judged: Judged) -> tuple[Floats, Floats]:
    """The share of answered rows for each possible threshold, ascending, and the share of errors among them: (C,)."""
    order = np.argsort(-judged.probability, kind="stable")
    falling = judged.probability[order]
    last = np.append(falling[1:] < falling[:-1], True)  # of rows with the same probability
    answered = np.arange(1, len(judged) + 1)
    return (answered / len(judged))[last], (np.cumsum(~judged.right[order]) / answered)[last]


def _divide(proposing: Judged, rows: int, max_error: float, level: float) -> list[int | None]:
    """The labels of the groups. As many labels as possible, the most frequent ones first, have a group of their own.
    Labels that validation has no prediction of are in the last group, None, if there is one."""
    labels, counts = np.unique(proposing.label, return_counts=True)
    expected = counts * rows / max(1, len(proposing))
    order, own = np.argsort(-expected, kind="stable"), 0
    for number in range(1, len(labels) + 1 if len(labels) > 1 else 1):
        groups = number + (number < len(labels))
        if expected[order[number - 1]] < OWN_THRESHOLD * fewest_rows(max_error, level / groups):
            break
        own = number
    return [*labels[order[:own]].tolist(), *([None] if own < len(labels) else [])]


def _find_threshold(
    label: int | None, proposing: Judged, deciding: Judged, max_error: float, level: float
) -> LabelThreshold:
    """The threshold of one group, at this error level."""
    from scipy.stats import beta, binom

    threshold, at = None, (0, 0)
    for candidate in _candidates(proposing, max_error):
        answered = deciding.probability >= candidate
        rows, errors = int(answered.sum()), int((answered & ~deciding.right).sum())
        if not rows or binom.cdf(errors, rows, max_error) > level:
            break
        threshold, at = candidate, (rows, errors)
    at_most = float(beta.isf(level, at[1] + 1, at[0] - at[1])) if threshold is not None else None
    return LabelThreshold(label, threshold, *at, len(deciding), at_most)


def _candidates(proposing: Judged, max_error: float) -> list[float]:
    """Falling thresholds, from the one whose share of errors is lowest beside `max_error`, in standard errors. The last
    one, 0, answers every row."""
    falling = -np.sort(-proposing.probability)
    places = np.ceil(np.linspace(0, len(falling), CANDIDATES + 1)[1:]).astype(np.int64) - 1
    thresholds = -np.unique(-falling[places])
    answered = proposing.probability >= thresholds[:, None]  # (C, N)
    rows = answered.sum(axis=1)
    share = ((answered & ~proposing.right).sum(axis=1) + 1) / (rows + 1)
    first = int(np.argmax((max_error - share) * np.sqrt(rows)))
    return [*thresholds[first:-1].tolist(), 0.0]
