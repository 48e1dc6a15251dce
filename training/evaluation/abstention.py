"""The rows that a person should look at: a threshold on the probability of a prediction, above which the model errs at
most so often; and sets of labels, one of which is right with a given chance.

The threshold comes from Learn then Test (Angelopoulos et al., 2021), on two samples of rows that share none:

validation   proposes. A label has a threshold of its own if enough rows are predicted to have it; the others share one.
             For each of these parts, the candidates are quantiles of the validation rows' probabilities, and the first
             to be tested is the one that promises most. All of this is fixed before a row of the other sample is seen,
             so the model's checkpoint and its temperature may come from the same rows.
test         decides. From the first candidate on to lower ones (fixed-sequence testing), each is tested by the exact
             binomial test of Clopper and Pearson, and the last one before the first that fails is taken. Each of M
             parts has the error level (1 - confidence) / M.

So with the confidence, on all future rows like these, no part errs more often than `max_error` among its answered
rows: for any number of rows, any ties, and probabilities however wrong. Conformal risk control would bound only the
mean over many such models; a model that is released is one.

Rows of one group of data.split, such as all messages of a customer, may be alike. With groups, Gaffke's bound of
group_tests.py takes the place of the binomial test, and a set counts one more group in place of one more row.

N rows, L labels, M parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from training.evaluation.group_tests import chance_of_so_few, groups_for_share, highest_share_by_groups
from training.evaluation.predictions import Floats, Mask, Rows
from training.evaluation.row_groups import Groups

CANDIDATES = 50
"""Thresholds that are tried at most: those that answer 2 %, 4 %, …, 100 % of a part's validation rows."""
OWN_THRESHOLD = 4
"""A label has its own threshold if so many times the fewest rows (or groups) that can pass are expected of it."""


@dataclass(frozen=True)
class LabelThreshold:
    """The rows with one predicted label, or with any of those that have no part of their own; their threshold, and the
    rows that decided."""

    label: int | None
    """None: all labels that no other part has."""
    threshold: float | None
    """Rows are answered whose probability is at least this; None: no row is."""
    answered: int
    """Rows of the test sample."""
    errors: int
    """Of these."""
    rows: int
    """The part's rows of the test sample."""
    at_most: float | None
    """Upper bound of the share of errors among answered rows."""


@dataclass(frozen=True)
class Judged:
    """Predictions of rows whose labels are known."""

    probability: Floats  # (N,) that the prediction is right
    label: Rows  # (N,) the predicted label; 0 if a row has any number of them
    right: Mask  # (N,)
    groups: Groups | None = None
    """None: each row is a group of its own."""

    def __len__(self) -> int:
        return len(self.right)

    def take(self, rows: Rows | Mask) -> Judged:
        """These rows."""
        groups = self.groups.take(rows) if self.groups else None
        return Judged(self.probability[rows], self.label[rows], self.right[rows], groups)

    @property
    def units(self) -> int:
        """The number of groups, or without any of rows."""
        return len(self.groups.sizes) if self.groups else len(self)


def fewest_rows(max_error: float, level: float) -> int:
    """The fewest answered rows, all of them right, that pass."""
    return math.ceil(math.log(level) / math.log1p(-max_error))


def find_thresholds(proposing: Judged, deciding: Judged, max_error: float, confidence: float) -> list[LabelThreshold]:
    """The parts, with their thresholds. `proposing` and `deciding` share no rows, and no groups."""
    labels = _divide(proposing, deciding.units, max_error, 1 - confidence)
    level, found = (1 - confidence) / len(labels), list[LabelThreshold]()
    for label in labels:
        first, second = (one.take(in_part(one.label, label, labels)) for one in (proposing, deciding))
        found.append(_find_threshold(label, first, second, max_error, level))
    return found


def in_part(predicted: Rows, label: int | None, labels: Sequence[int | None]) -> Mask:
    """(N,) whether the row belongs to the part of a label, among the parts of these labels, from its prediction."""
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


def least_probability(true_probabilities: Floats, coverage: float, groups: Groups | None = None) -> float:
    """The probability from which a label belongs to a row's set, given the (N,) probabilities of the true labels of
    rows that the model has not seen. 0, so that every label does, if there are too few rows.

    A set has the true label of a further row with a chance of at least `coverage`, over the draw of these rows too
    (split conformal prediction with the score of Sadinle et al., Least Ambiguous Set-Valued Classifiers, 2019). With
    groups, that is a row of a further group: each group has the same weight, which its rows share (Lee, Barber and
    Willett, Distribution-Free Inference with Hierarchical Data, 2023).
    """
    weights = np.ones(len(true_probabilities)) if groups is None else 1 / groups.sizes[groups.numbers]
    units = len(true_probabilities) if groups is None else len(groups.sizes)
    order = np.argsort(true_probabilities, kind="stable")
    below = np.cumsum(weights[order]) - weights[order]
    possible = np.flatnonzero(below + 1 <= (units + 1) * (1 - coverage) + 1e-9)
    return float(true_probabilities[order[possible[-1]]]) if len(possible) else 0.0


def risk_coverage(judged: Judged) -> tuple[Floats, Floats]:
    """The share of answered rows for each possible threshold, ascending, and the share of errors among them: (C,)."""
    order = np.argsort(-judged.probability, kind="stable")
    falling = judged.probability[order]
    last = np.append(falling[1:] < falling[:-1], True)  # of rows with the same probability
    answered = np.arange(1, len(judged) + 1)
    return (answered / len(judged))[last], (np.cumsum(~judged.right[order]) / answered)[last]


def _divide(proposing: Judged, units: int, max_error: float, level: float) -> list[int | None]:
    """The labels of the parts. As many labels as possible, the most frequent ones first, have a part of their own.
    Labels that validation has no prediction of are in the last part, None, if there is one. `units` is the number of
    groups, or without any of rows, that decide."""
    labels = np.unique(proposing.label)
    of_label = [proposing.take(proposing.label == label) for label in labels]
    expected = np.array([rows.units for rows in of_label]) * units / max(1, proposing.units)
    order, own = np.argsort(-expected, kind="stable"), 0
    for number in range(1, len(labels) + 1 if len(labels) > 1 else 1):
        parts, last = number + (number < len(labels)), order[number - 1]
        if expected[last] < OWN_THRESHOLD * _fewest_units(of_label[last], max_error, level / parts):
            break
        own = number
    return [*labels[order[:own]].tolist(), *([None] if own < len(labels) else [])]


def _fewest_units(rows: Judged, max_error: float, level: float) -> int:
    """The fewest rows, or groups like those of these rows, that pass without an error."""
    if rows.groups is None:
        return fewest_rows(max_error, level)
    return groups_for_share(rows.groups, max_error, 1 - level)


def _find_threshold(
    label: int | None, proposing: Judged, deciding: Judged, max_error: float, level: float
) -> LabelThreshold:
    """The threshold of one part, at this error level."""
    threshold, answered = None, deciding.take(np.zeros(len(deciding), np.bool_))
    worst = _worst_size(deciding)
    for candidate in _candidates(proposing, max_error):
        rows = deciding.take(deciding.probability >= candidate)
        if not len(rows) or _chance_of_so_few_errors(rows, max_error, worst) > level:
            break
        threshold, answered = candidate, rows
    at_most = _highest_share(answered, level, worst) if threshold is not None else None
    errors = int((~answered.right).sum())
    return LabelThreshold(label, threshold, len(answered), errors, len(deciding), at_most)


def _worst_size(rows: Judged) -> float | None:
    """The size of the worst case: the usual size of a part's groups, answered or not, or of those with an error if they
    are larger. None without groups."""
    if rows.groups is None or not len(rows):
        return None
    with_error = (rows.groups.sums(~rows.right) > 0)[rows.groups.numbers]
    return max(one.usual_size for one in (rows.groups, rows.groups.take(with_error)) if len(one.sizes))


def _chance_of_so_few_errors(rows: Judged, share: float, worst: float | None) -> float:
    """The chance of as few errors, or fewer, if this share of all such rows is wrong."""
    from scipy.stats import binom

    if rows.groups is None:
        return float(binom.cdf((~rows.right).sum(), len(rows), share))
    return chance_of_so_few(~rows.right, rows.groups, share, worst)


def _highest_share(rows: Judged, level: float, worst: float | None) -> float:
    """The upper bound of the share of errors."""
    from scipy.stats import beta

    if rows.groups is None:
        errors = int((~rows.right).sum())
        return float(beta.isf(level, errors + 1, len(rows) - errors))
    return highest_share_by_groups(~rows.right, rows.groups, 1 - level, worst)


def _candidates(proposing: Judged, max_error: float) -> list[float]:
    """Falling thresholds, from the one whose share of errors is lowest beside `max_error`, in standard errors. The last
    one, 0, answers every row."""
    falling = -np.sort(-proposing.probability)
    places = np.ceil(np.linspace(0, len(falling), CANDIDATES + 1)[1:]).astype(np.int64) - 1
    thresholds = -np.unique(-falling[places])
    answered = proposing.probability >= thresholds[:, None]  # (C, N)
    rows, worst = answered.sum(axis=1), proposing.groups.usual_size if proposing.groups else 1
    share = ((answered & ~proposing.right).sum(axis=1) + worst) / (rows + worst)
    first = int(np.argmax((max_error - share) * np.sqrt(rows)))
    return [*thresholds[first:-1].tolist(), 0.0]
