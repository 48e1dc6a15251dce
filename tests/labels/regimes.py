"""Homes with planted wrong labels: how often the interval of the share of errors in the list covers the truth.

A home draws rows from a mixture of normal distributions, one a label, plants wrong labels, and predicts each row by a
model that was trained without its fold. The classes overlap: the best model, too, disagrees with right labels.

N rows, L labels, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import softmax
from threadpoolctl import threadpool_limits

from training.evaluation.label_errors import Suspects, find_suspects, two_outcomes

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
FOLDS = 5

Model = Callable[[Floats, Rows, Floats, int], Floats]
"""Returns the probabilities of new rows, of the rows and labels that it learns, the new rows, and L."""


def logistic(rows: Floats, labels: Rows, new: Floats, count: int) -> Floats:
    """A multinomial logistic regression."""
    rows, new = (np.hstack([one, np.ones((len(one), 1))]) for one in (rows, new))
    own, places = np.eye(count)[labels], np.arange(len(labels))

    def loss(weights: Floats) -> tuple[float, Floats]:
        found = softmax(rows @ weights.reshape(-1, count), axis=1)
        slope = rows.T @ (found - own) + weights.reshape(-1, count)
        return float(0.5 * weights @ weights - np.log(found[places, labels] + 1e-300).sum()), slope.ravel()

    weights = minimize(loss, np.zeros(rows.shape[1] * count), jac=True, method="L-BFGS-B", options={"maxiter": 60}).x
    return np.asarray(softmax(new @ weights.reshape(-1, count), axis=1))


def overconfident(rows: Floats, labels: Rows, new: Floats, count: int) -> Floats:
    """A logistic regression whose logits are four times too large."""
    found = logistic(rows, labels, new, count) ** 4
    return np.asarray(found / found.sum(axis=1, keepdims=True))


def naive_bayes(rows: Floats, labels: Rows, new: Floats, count: int) -> Floats:
    """Gaussian naive Bayes that sees each feature three times, so that it takes them for independent evidence."""
    logits = np.full((len(new), count), -1e3)
    for label in range(count):
        if (own := rows[labels == label]).shape[0] > 1:
            spread = own.var(axis=0) + 0.05
            density = -0.5 * ((new - own.mean(axis=0)) ** 2 / spread + np.log(spread)).sum(axis=1)
            logits[:, label] = 3 * density + np.log(len(own) / len(rows))
    return np.asarray(softmax(logits, axis=1))


def neighbours(rows: Floats, labels: Rows, new: Floats, count: int) -> Floats:
    """The shares of labels among the 25 nearest rows: few different probabilities, all rows of a label at the top."""
    distances = (new**2).sum(axis=1)[:, None] - 2 * new @ rows.T + (rows**2).sum(axis=1)
    nearest = np.argpartition(distances, 25, axis=1)[:, :25]
    counts = np.eye(count)[labels[nearest]].sum(axis=1)
    return np.asarray((counts + 0.1) / (25 + 0.1 * count))


@dataclass(frozen=True)
class Regime:
    """How a home's rows, labels and model are."""

    errors: float = 0.05
    kind: Literal["uniform", "pairs", "unsure"] = "uniform"
    """A wrong label is any other, or always the next one; or only rows between two classes have one."""
    model: Model = logistic
    rows: int = 2_000
    shares: Sequence[float] = (0.25, 0.25, 0.25, 0.25)
    """Of the rows with each label."""
    distance: float = 2.2
    """Of the classes' centres from 0; the spread of a class is 1 in each of the D = 10 features."""
    several: bool = False
    """Whether a row has any number of labels."""

    def home(self, seed: int) -> Home:
        """Draws a home and lists its suspects."""
        random, count = np.random.default_rng(seed), len(self.shares)
        centres = random.normal(size=(count, 10))
        centres *= self.distance / np.linalg.norm(centres, axis=1, keepdims=True)
        if self.several:
            return self._with_several(random, centres)
        truth = random.choice(count, size=self.rows, p=self.shares)
        rows = centres[truth] + random.normal(size=(self.rows, 10))
        given = self._plant(random, rows, truth, centres)
        probabilities = _out_of_fold(random, self.model, rows, given, count)
        return Home(find_suspects(given, probabilities), given != truth)

    def _plant(self, random: np.random.Generator, rows: Floats, truth: Rows, centres: Floats) -> Rows:
        count = len(centres)
        if self.kind == "unsure":
            scores = rows @ centres.T - 0.5 * (centres**2).sum(axis=1)
            first, second = np.sort(scores, axis=1)[:, -1], np.sort(scores, axis=1)[:, -2]
            unsure = first - second < np.quantile(first - second, 0.25)
            wrong = unsure & (random.random(len(truth)) < 4 * self.errors)
        else:
            wrong = random.random(len(truth)) < self.errors
        steps = random.integers(1, count, len(truth)) if self.kind != "pairs" else np.ones(len(truth), np.int64)
        return np.where(wrong, (truth + steps) % count, truth)

    def _with_several(self, random: np.random.Generator, centres: Floats) -> Home:
        has = random.random((self.rows, len(centres))) < 0.3
        rows = has @ centres + random.normal(size=(self.rows, 10))
        wrong = random.random(has.shape) < self.errors
        given = has ^ wrong
        found = [
            _out_of_fold(random, self.model, rows, given[:, label].astype(np.int64), 2)[:, 1]
            for label in range(len(centres))
        ]
        probabilities = two_outcomes(np.stack(found, axis=1).ravel())
        suspects = find_suspects(given.ravel().astype(np.int64), probabilities)
        return Home(suspects, wrong.ravel(), len(centres))


def _out_of_fold(random: np.random.Generator, model: Model, rows: Floats, labels: Rows, count: int) -> Floats:
    fold, found = random.integers(0, FOLDS, len(rows)), np.zeros((len(rows), count))
    for number in range(FOLDS):
        out = fold == number
        found[out] = model(rows[~out], labels[~out], rows[out], count)
    return found


@dataclass(frozen=True)
class Home:
    """The suspects of a home, and which of its entries are wrong."""

    suspects: Suspects
    wrong: npt.NDArray[np.bool_]
    entries_of_row: int = 1

    @property
    def listed(self) -> Rows:
        """The rows of the suspects."""
        return np.asarray(self.suspects.entries // self.entries_of_row)

    @property
    def truth(self) -> float:
        """The share of the listed rows with a wrong label among those that are suspected."""
        listed = np.unique(self.listed)
        truly = np.unique(self.listed[self.wrong[self.suspects.entries]])
        return len(truly) / len(listed) if len(listed) else 0.0


@dataclass(frozen=True)
class Found:
    """The homes of a regime."""

    homes: int
    covered: int
    """Homes whose interval covers the truth."""
    bare_covered: int
    """The same if all listed rows counted as errors, with the interval of Clopper and Pearson."""
    listed: float
    truth: float
    low: float
    expected: float
    high: float
    """Means of the homes."""


def simulate(regime: Regime, homes: int) -> Found:
    """Draws homes and counts those whose interval covers the truth."""
    values, covered, bare = list[list[float]](), 0, 0
    for seed in range(homes):
        with threadpool_limits(1):  # the matrices are too small for more
            home = regime.home(seed)
        share, truth = home.suspects.share(home.listed), home.truth
        if share is None:
            covered, bare = covered + 1, bare + 1
            continue
        listed = len(np.unique(home.listed))
        covered += share.low - 1e-9 <= truth <= share.high + 1e-9
        bare += truth >= 0.025 ** (1 / listed)
        values.append([listed, truth, share.low, share.expected, share.high])
    means = np.mean(values, axis=0).tolist() if values else [0.0] * 5
    return Found(homes, covered, bare, *means)


REGIMES: Mapping[str, Regime] = {
    "5 % of any other label": Regime(),
    "5 % of the next label": Regime(kind="pairs"),
    "no error": Regime(errors=0.0),
    "rare labels": Regime(shares=(0.9, 0.06, 0.03, 0.01)),
    "rare labels, no error": Regime(shares=(0.9, 0.06, 0.03, 0.01), errors=0.0),
    "overconfident": Regime(model=overconfident),
    "overconfident, no error": Regime(model=overconfident, errors=0.0),
    "naive Bayes": Regime(model=naive_bayes),
    "naive Bayes, no error": Regime(model=naive_bayes, errors=0.0),
    "two labels": Regime(shares=(0.5, 0.5), distance=1.5),
    "two labels, no error": Regime(shares=(0.5, 0.5), distance=1.5, errors=0.0),
    "20 labels": Regime(shares=(0.05,) * 20, distance=3.5),
    "500 rows": Regime(rows=500),
    "20 % of any other label": Regime(errors=0.2),
    "classes far apart": Regime(distance=4.0),
    "several labels a row": Regime(several=True),
    "several labels a row, no error": Regime(several=True, errors=0.0),
    "nearest neighbours": Regime(model=neighbours),
    "nearest neighbours, no error": Regime(model=neighbours, errors=0.0),
    "only where classes meet": Regime(kind="unsure"),
}
PROMISED = (
    "5 % of any other label",
    "5 % of the next label",
    "no error",
    "rare labels",
    "rare labels, no error",
    "overconfident",
    "overconfident, no error",
    "naive Bayes",
    "naive Bayes, no error",
    "two labels",
)
"""The regimes in which the interval covers the truth in 19 of 20 homes."""
