"""Labels that are probably wrong, and the share of them that is: an estimate from out-of-fold probabilities.

Rows are listed by confident learning (Northcutt, Jiang and Chuang 2021): the most likely label among those whose
probability is at least as high as it usually is for rows with that label, where it is not the label of the row.

A model disagrees with a label because the label or the model is wrong. Only the model's errors become rare as it
becomes surer. So the labels are taken for draws of

    P(label j) = (1 - e) p_j + e sum_k p_k m_kj

where p are the calibrated probabilities of the true label, e the share of wrong labels in all rows, and m_kj the chance
that a wrong label of k is j. p is a mixture of softmax(z / T + b) and softmax(z / (TAIL T) + b), z = ln of the model's
probabilities: a model may be as overconfident as it likes, and more so where it is surest. T, b and the weight of the
mixture are fitted for each e of a grid, by maximum likelihood. The e that these likelihoods allow give the interval.

N entries (rows; or labels of rows, or words), L labels, E values of e.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator
from scipy.optimize import minimize
from scipy.special import expit, softmax

from training.evaluation.scores import ErrorShare

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

TAIL = 3.0
"""How many times as overconfident the model may be where it is surest."""
RATES = np.array(
    [0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.13, 0.17, 0.22, 0.3, 0.4]
)  # (E,)
"""The shares of wrong labels in all rows that are tried."""
LIKELIHOOD_DROP = 2.7
"""A rate of errors is possible if the log-likelihood with it is at most this much below the highest."""
Z = 1.96
"""Standard errors of the number of wrong labels among the listed ones, for an interval of 95 %."""
MOST_ENTRIES, MOST_VALUES = 20_000, 2_000_000
"""The model of labels is fitted on at most as many entries, and as many of their probabilities."""
_PSEUDO_ERRORS = 2.0
"""Wrong labels of each kind that are added to those found, so that a kind that is rare is possible."""


@dataclass(frozen=True)
class Suspects:
    """The entries whose label is probably wrong, the surest first."""

    entries: Rows  # (S,)
    suggestions: Rows  # (S,) labels that are more likely
    chances: Floats  # (S,) that the label is wrong, by the expected rate of errors
    possible_chances: Floats  # (R, S) for each possible rate of errors, rising
    noise: float
    """The expected share of wrong labels in all entries."""

    def take(self, which: npt.NDArray[np.bool_]) -> Suspects:
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
    confident = np.where(probabilities >= usual, probabilities, -1)
    return np.where(confident.max(axis=1) >= 0, confident.argmax(axis=1), -1)


def find_suspects(references: Rows, probabilities: Floats, seed: int = 0) -> Suspects:
    """Finds the wrong labels among `references` (N,), given out-of-fold `probabilities` (N, L)."""
    confident = confident_labels(references, probabilities)
    entries = np.flatnonzero((confident >= 0) & (confident != references))
    count, labels = probabilities.shape
    logs = np.log(np.clip(probabilities, 1e-9, 1))
    chosen = np.arange(count)
    if (most := max(1_000, min(MOST_ENTRIES, MOST_VALUES // labels))) < count:
        chosen = np.sort(np.random.default_rng(seed).permutation(count)[:most])
    profile = _Profile(logs[chosen], references[chosen])
    rates, expected = profile.possible_rates()
    chances = np.array([profile.chances(rate, logs[entries], references[entries]) for rate in rates])
    found = profile.chances(expected, logs[entries], references[entries])
    margins = logs[entries, confident[entries]] - logs[entries, references[entries]]
    order = np.lexsort((-margins, -found))
    return Suspects(entries[order], confident[entries][order], found[order], chances[:, order], float(expected))


class _Profile:
    """The model of the labels, fitted for each rate of errors."""

    def __init__(self, logs: Floats, references: Rows) -> None:
        labels = logs.shape[1]
        self._confusion = (1 - np.eye(labels)) / max(1, labels - 1)  # (L, L) m_kj
        self._fit_all(logs, references)
        best = int(self.likelihoods.argmax())
        if labels > 2 and RATES[best] > 0:
            for _ in range(10):
                joint = self._joint(RATES[best], self._parameters[best], logs, references)  # (N, L)
                found = np.zeros((labels, labels))
                np.add.at(found.T, references, joint)
                found += _PSEUDO_ERRORS * (1 - np.eye(labels))
                np.fill_diagonal(found, 0)
                self._confusion = found / found.sum(axis=1, keepdims=True)
            self._fit_all(logs, references)

    def _fit_all(self, logs: Floats, references: Rows) -> None:
        parameters = np.zeros(logs.shape[1] + 2)
        parameters[-1] = -3.0
        self._parameters, likelihoods = list[Floats](), list[float]()
        for rate in RATES:
            parameters, likelihood = _fit(rate, self._confusion, logs, references, parameters)
            self._parameters.append(parameters)
            likelihoods.append(likelihood)
        self.likelihoods = np.array(likelihoods)  # (E,)

    def possible_rates(self) -> tuple[Floats, float]:
        """The rates of errors that the labels allow, rising, and the most likely one."""
        fine = np.linspace(0, RATES[-1], 801)
        likelihoods = PchipInterpolator(RATES, self.likelihoods)(fine)
        possible = fine[likelihoods >= likelihoods.max() - LIKELIHOOD_DROP]
        between = [rate for rate in RATES if possible[0] < rate < possible[-1]]
        return np.array([possible[0], *between, possible[-1]]), float(fine[likelihoods.argmax()])

    def chances(self, rate: float, logs: Floats, references: Rows) -> Floats:
        """(N,) the chance that each label is wrong, if the rate of errors is this one."""
        after = int(np.searchsorted(RATES, rate))
        before = max(0, after - 1)
        weight = 1.0 if after == before else (rate - RATES[before]) / (RATES[after] - RATES[before])
        ends = [
            self._joint(RATES[place], self._parameters[place], logs, references).sum(axis=1)
            for place in (before, after)
        ]
        return np.asarray((1 - weight) * ends[0] + weight * ends[1])

    def _joint(self, rate: float, parameters: Floats, logs: Floats, references: Rows) -> Floats:
        """(N, L) the chance that the label is wrong and the true one is k."""
        true, rows = _calibrated(parameters, logs)[0], np.arange(len(logs))
        wrong = rate * true * self._confusion[:, references].T
        all_ = (1 - rate) * true[rows, references] + wrong.sum(axis=1)
        return np.asarray(wrong / np.maximum(all_, 1e-300)[:, None])


def _calibrated(parameters: Floats, logs: Floats) -> tuple[Floats, Floats, Floats, float]:
    """(N, L) the calibrated probabilities; those of the two temperatures, and the weight of the second."""
    temperature, bias, weight = np.exp(parameters[0]), parameters[1:-1], float(expit(parameters[-1]))
    first, second = softmax(logs / temperature + bias, axis=1), softmax(logs / (TAIL * temperature) + bias, axis=1)
    return (1 - weight) * first + weight * second, first, second, weight


def _fit(rate: float, confusion: Floats, logs: Floats, references: Rows, start: Floats) -> tuple[Floats, float]:
    """Fits ln T, b and the logit of the weight. Returns them, and the log-likelihood of the labels."""
    observed = ((1 - rate) * np.eye(logs.shape[1]) + rate * confusion)[:, references].T  # (N, L)

    def loss(parameters: Floats) -> tuple[float, Floats]:
        temperature = np.exp(parameters[0])
        _, first, second, weight = _calibrated(parameters, logs)
        parts = [(first * observed).sum(axis=1), (second * observed).sum(axis=1)]
        likelihood = np.maximum((1 - weight) * parts[0] + weight * parts[1], 1e-300)
        slopes = [
            share * probabilities * (observed - part[:, None]) / likelihood[:, None]
            for share, probabilities, part in zip((1 - weight, weight), (first, second), parts, strict=True)
        ]
        of_temperature = -(slopes[0] * logs).sum() / temperature - (slopes[1] * logs).sum() / (TAIL * temperature)
        of_bias = (slopes[0] + slopes[1]).sum(axis=0)
        of_weight = ((parts[1] - parts[0]) / likelihood).sum() * weight * (1 - weight)
        bias, pull = parameters[1:-1], 0.05 * (parameters[-1] + 3)
        penalty = 0.5 * (bias**2).sum() + 0.5 * pull * (parameters[-1] + 3)
        slope = np.concatenate([[-of_temperature], bias - of_bias, [pull - of_weight]])
        return float(penalty - np.log(likelihood).sum()), slope

    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 60, "ftol": 1e-7})
    return found.x, -float(found.fun)


def find_outliers(references: Floats, predictions: Floats, threshold: float = 4.0) -> Rows:
    """Returns the entries whose number is further from its prediction than `threshold` robust standard deviations
    (1.4826 times the median absolute deviation) of the errors, the furthest first. How many of them are wrong is
    unknown, as the tails of right numbers are."""
    errors = references - predictions
    center = float(np.median(errors)) if len(errors) else 0.0
    scale = 1.4826 * float(np.median(np.abs(errors - center))) if len(errors) else 0.0
    if scale == 0:
        return np.zeros(0, np.int64)
    distances = np.abs(errors - center) / scale
    found = np.flatnonzero(distances > threshold)
    return found[np.argsort(-distances[found], kind="stable")]


def two_outcomes(probabilities: Floats) -> Floats:
    """(N, 2) the probabilities that something is not so and is so, of (N,) those that it is so."""
    return np.stack([1 - probabilities, probabilities], axis=1)
