"""Labels that are probably wrong, and the share of them that is: an estimate from out-of-fold probabilities.

Rows are listed by confident learning (Northcutt, Jiang and Chuang 2021): the most likely label among those whose
probability is at least as high as it usually is for rows with that label, where the model has another label than the
row.

A model disagrees with a label because the label or the model is wrong. Only the model's errors become rare as it
becomes surer. So with e, the share of wrong labels in all rows, a model that is right with chance c agrees with

    P(agree) = (1 - e) c + e (1 - c) / (L - 1)

of the labels. c is a mixture of logistic(z / T + b) and logistic(z / (TAIL T) + b), z the logit of the probability of
the model's label: a model may be as overconfident as it likes, and more so where it is surest. T, b and the weight of
the mixture are fitted for each e of a grid, by maximum likelihood. The e that these likelihoods allow give the
interval. Which of the other labels a row has is not used: models confuse labels as people do.

N entries (rows; or labels of rows, or words), S suspects, L labels, E values of e.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import minimize
from scipy.special import expit, logit

from training.evaluation.predictions import Floats, Mask, Rows
from training.evaluation.scores import ErrorShare

TAIL = 3.0
"""How many times as overconfident the model may be where it is surest."""
RATES = np.array(
    [0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.13, 0.17, 0.22, 0.3, 0.4]
)  # (E,)
"""The shares of wrong labels in all rows that are tried."""
LIKELIHOOD_DROP = 2.7
"""A rate of errors is possible if the log-likelihood with it is at most this much below the highest: more than the
1.92 of an interval of 95 %, because the model of the labels is not exact."""
Z = 1.96
"""Standard errors of the number of wrong labels among the listed ones, for an interval of 95 %."""
OUTLYING = 4.0
"""Standard deviations of an error from which a number is listed."""
MOST_ENTRIES = 20_000
"""The model of the labels is fitted on at most as many entries."""


@dataclass(frozen=True)
class Suspects:
    """The entries whose label is probably wrong, the surest first."""

    entries: Rows  # (S,)
    suggestions: Rows  # (S,) labels that are more likely
    chances: Floats  # (S,) that the label is wrong, by the expected rate of errors
    possible_chances: Floats  # (R, S) for each possible rate of errors, rising
    noise: float
    """The expected share of wrong labels in all entries."""

    def take(self, which: Mask) -> Suspects:
        """The suspects where the mask is true."""
        return Suspects(
            self.entries[which],
            self.suggestions[which],
            self.chances[which],
            self.possible_chances[:, which],
            self.noise,
        )

    def share(self, rows: Rows) -> ErrorShare | None:
        """The share of rows with a wrong label among those that are listed. `rows` (S,) are the rows of the entries; a
        row may have several. None for an empty list."""
        distinct, place = np.unique(rows, return_inverse=True)
        if not len(distinct):
            return None

        def of_rows(chances: Floats) -> Floats:
            right = np.zeros(len(distinct))
            np.add.at(right, place, np.log1p(-np.minimum(chances, 1 - 1e-12)))
            return 1 - np.exp(right)

        found = [of_rows(chances) for chances in self.possible_chances]
        least, most = (min(found, key=lambda one: float(one.mean())), max(found, key=lambda one: float(one.mean())))
        spreads = [Z * float(np.sqrt((one * (1 - one)).sum())) for one in (least, most)]
        count = len(distinct)
        return ErrorShare(
            low=max(0.0, (float(least.sum()) - spreads[0]) / count),
            expected=float(of_rows(self.chances).mean()),
            high=min(1.0, (float(most.sum()) + spreads[1] + 1) / count),
        )


def confident_labels(references: Rows, probabilities: Floats) -> Rows:
    """(N,) the label that each entry most confidently has, by confident learning; -1 if it has none."""
    rows_of = np.bincount(references, minlength=probabilities.shape[1])
    own = np.bincount(references, probabilities[np.arange(len(references)), references], probabilities.shape[1])
    usual = np.divide(own, rows_of, out=np.full(len(own), np.inf), where=rows_of > 0)  # (L,)
    confident = np.where(probabilities >= usual - 1e-9, probabilities, -1)
    return np.where(confident.max(axis=1) >= 0, confident.argmax(axis=1), -1)


def find_suspects(references: Rows, probabilities: Floats) -> Suspects:
    """Finds the wrong labels among `references` (N,), given out-of-fold `probabilities` (N, L)."""
    confident, own = confident_labels(references, probabilities), probabilities.argmax(axis=1)
    listed = (confident >= 0) & (confident != references) & (own != references)
    return rank_suspects(listed, confident, own == references, probabilities.max(axis=1), probabilities.shape[1])


def find_wrong_tags(references: Rows, predictions: Rows, certainty: Floats, labels: int) -> Suspects:
    """Finds the wrong tags among `references` (W,), given the model's tags (W,) and only their probabilities (W,). A
    tag is confident from its mean probability among the words that have it and that the model gives it to."""
    agrees = references == predictions
    count = np.bincount(references[agrees], minlength=labels)
    total = np.bincount(references[agrees], certainty[agrees], labels)
    usual = np.divide(total, count, out=np.full(labels, np.inf), where=count > 0)  # (L,)
    return rank_suspects(~agrees & (certainty >= usual[predictions] - 1e-9), predictions, agrees, certainty, labels)


def rank_suspects(listed: Mask, suggestions: Rows, agrees: Mask, certainty: Floats, labels: int) -> Suspects:
    """Ranks the entries that are `listed` (N,), with the labels that are suggested for them (N,), given whether the
    model has the label of the entry (N,) and the probability of the model's label (N,)."""
    logits = logit(np.clip(certainty, 1e-9, 1 - 1e-9))
    chosen = np.arange(len(agrees))
    if len(chosen) > MOST_ENTRIES:
        chosen = np.sort(np.random.default_rng(0).permutation(len(chosen))[:MOST_ENTRIES])
    fits = _Fits(logits[chosen], agrees[chosen], labels)
    rates, expected = fits.possible_rates()
    entries = np.flatnonzero(listed)
    possible = np.array([fits.chances(rate, logits[entries]) for rate in rates])
    chances = fits.chances(expected, logits[entries])
    order = np.lexsort((-logits[entries], -chances))
    return Suspects(entries[order], suggestions[entries][order], chances[order], possible[:, order], expected)


class _Fits:
    """The model of the labels, fitted for each rate of errors."""

    def __init__(self, logits: Floats, agrees: Mask, labels: int) -> None:
        self._others = max(1, labels - 1)
        fresh = np.array([0.0, 0.0, -3.0])
        self._parameters, likelihoods = [fresh], list[float]()
        for rate in RATES:  # the best fit of a rate may be far from that of the one before
            found = [self._fit(rate, logits, agrees, start) for start in (fresh, self._parameters[-1])]
            parameters, likelihood = max(found, key=lambda one: one[1])
            self._parameters.append(parameters)
            likelihoods.append(likelihood)
        del self._parameters[0]
        self.likelihoods = np.array(likelihoods)  # (E,)

    def _fit(self, rate: float, logits: Floats, agrees: Mask, start: Floats) -> tuple[Floats, float]:
        """Fits ln T, b and the logit of the weight. Returns them, and the log-likelihood of the agreements."""
        slope = 1 - rate - rate / self._others  # of the chance of an agreement by c
        sign = np.where(agrees, 1.0, -1.0)

        def loss(parameters: Floats) -> tuple[float, Floats]:
            temperature, offset, weight = np.exp(parameters[0]), parameters[1], float(expit(parameters[2]))
            parts = [expit(logits / (factor * temperature) + offset) for factor in (1, TAIL)]
            agreement = rate / self._others + slope * ((1 - weight) * parts[0] + weight * parts[1])
            likelihood = np.maximum(np.where(agrees, agreement, 1 - agreement), 1e-300)
            by_chance = sign * slope / likelihood
            steps = [(1 - weight) * parts[0] * (1 - parts[0]), weight * parts[1] * (1 - parts[1])]
            of_temperature = -(by_chance * logits * (steps[0] + steps[1] / TAIL)).sum() / temperature
            of_offset = (by_chance * (steps[0] + steps[1])).sum()
            of_weight = (by_chance * (parts[1] - parts[0])).sum() * weight * (1 - weight)
            pull = 0.05 * (parameters[2] + 3)  # a weak prior, for labels that say nothing about the weight
            penalty = 0.5 * offset**2 + 0.5 * pull * (parameters[2] + 3)
            gradient = np.array([-of_temperature, offset - of_offset, pull - of_weight])
            return float(penalty - np.log(likelihood).sum()), gradient

        found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 100})
        return found.x, -float(found.fun)

    def possible_rates(self) -> tuple[Floats, float]:
        """The rates of errors that the labels allow, rising, and the most likely one."""
        fine = np.linspace(0, RATES[-1], 801)
        likelihoods = PchipInterpolator(RATES, self.likelihoods)(fine)
        possible = fine[likelihoods >= likelihoods.max() - LIKELIHOOD_DROP]
        between = [rate for rate in RATES if possible[0] < rate < possible[-1]]
        return np.array([possible[0], *between, possible[-1]]), float(fine[likelihoods.argmax()])

    def chances(self, rate: float, logits: Floats) -> Floats:
        """(N,) the chance that each label is wrong with which the model does not agree, if the rate of errors is this
        one."""
        after = int(np.searchsorted(RATES, rate))
        before = max(0, after - 1)
        weight = 1.0 if after == before else (rate - RATES[before]) / (RATES[after] - RATES[before])
        ends = [self._chances(place, logits) for place in (before, after)]
        return np.asarray((1 - weight) * ends[0] + weight * ends[1])

    def _chances(self, place: int, logits: Floats) -> Floats:
        rate, (log_temperature, offset, log_odds) = RATES[place], self._parameters[place]
        parts = [expit(logits / (factor * np.exp(log_temperature)) + offset) for factor in (1, TAIL)]
        right = (1 - expit(log_odds)) * parts[0] + expit(log_odds) * parts[1]
        wrong = rate * (right + (1 - right) * (1 - 1 / self._others))
        return np.asarray(wrong / np.maximum(wrong + (1 - rate) * (1 - right), 1e-300))


def find_outliers(references: Floats, predictions: Floats) -> Rows:
    """Returns the entries whose number is further from its prediction than OUTLYING robust standard deviations (1.4826
    times the median absolute deviation) of the errors, the furthest first. How many of them are wrong is unknown, as
    the tails of right numbers are."""
    errors = references - predictions
    center = float(np.median(errors)) if len(errors) else 0.0
    scale = 1.4826 * float(np.median(np.abs(errors - center))) if len(errors) else 0.0
    if scale == 0:
        return np.zeros(0, np.int64)
    distances = np.abs(errors - center) / scale
    found = np.flatnonzero(distances > OUTLYING)
    return found[np.argsort(-distances[found], kind="stable")]


def two_outcomes(probabilities: Floats) -> Floats:
    """(N, 2) the probabilities that something is not so and is so, of (N,) those that it is so."""
    return np.stack([1 - probabilities, probabilities], axis=1)
