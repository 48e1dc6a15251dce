"""Homes whose models answer some rows and leave others to a person: how often the true share of errors among the
answered rows stays within `max_error`.

A regime is a population of rows, each with its logits and label. A home draws its validation and its test rows from it,
or whole groups of rows; the share of errors that it will see later is that of the population.

P rows of a population in G groups, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from training.evaluation.abstention import (
    Judged,
    LabelThreshold,
    find_thresholds,
    in_part,
    needs_review,
    risk_coverage,
)
from training.evaluation.calibration import Scaling, fit_many_labels, fit_one_label, log_softmax
from training.evaluation.row_groups import Groups
from training.evaluation.significance import mcnemar

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
MAX_ERROR, CONFIDENCE = 0.05, 0.95
POPULATION = 20_000


@dataclass(frozen=True)
class Population:
    """All rows that a model may see."""

    logits: Floats  # (P, L)
    truth: npt.NDArray[np.generic]  # (P,) the label; or (P, L) whether the row has it
    sizes: Rows | None = None  # (G,) the rows of each group, which follow each other; None: rows are independent

    def draw(self, random: np.random.Generator, number: int) -> tuple[Rows, Groups | None]:
        """So many rows, or so many groups of rows."""
        if self.sizes is None:
            return random.integers(0, POPULATION, number), None
        drawn = random.integers(0, len(self.sizes), number)
        starts, sizes = (np.cumsum(self.sizes) - self.sizes)[drawn], self.sizes[drawn]
        rows = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        return rows, Groups(np.repeat(np.arange(number), sizes))

    def fit(self, rows: Rows) -> Scaling:
        """The calibration by these rows."""
        fit = fit_one_label if self.truth.ndim == 1 else fit_many_labels
        return fit(self.logits[rows], self.truth[rows])  # type: ignore[operator]

    def right(self, rows: Rows) -> Mask:
        """Whether the prediction of each of these rows is right."""
        logits, truth = self.logits[rows], self.truth[rows]
        return np.asarray(logits.argmax(axis=1) == truth if truth.ndim == 1 else ((logits >= 0) == truth).all(axis=1))

    def judge(self, scaling: Scaling) -> Judged:
        """All predictions, with calibrated probabilities."""
        logits = scaling.apply(self.logits)
        if self.truth.ndim == 1:
            label = logits.argmax(axis=1)
            return Judged(np.exp(log_softmax(logits).max(axis=1)), label, label == self.truth)
        probability, decided = 1 / (1 + np.exp(-np.abs(logits))), self.logits >= 0
        label = np.zeros(len(logits), np.int64)
        return Judged(probability.prod(axis=1), label, (decided == self.truth).all(axis=1))


@dataclass(frozen=True)
class Regime:
    """A population, and the rows of a home."""

    draw: Callable[[np.random.Generator], Population]
    validation: int = 1_000
    test: int = 1_000
    """Rows, or groups."""
    ignored: bool = False
    """Whether the rows of groups are taken for independent."""
    checkpoints: int = 1
    """Equally good models, of which validation chooses the most accurate one."""
    nights: int = 1
    """Equally good models, of which the gate promotes each that is better on the test rows."""

    def homes(self, number: int, seed: int = 0) -> Outcomes:
        """The outcomes of so many homes."""
        random = np.random.default_rng(seed)
        populations = [self.draw(np.random.default_rng([seed, 1]))]
        populations += [_retrained(populations[0], random) for _ in range(max(self.checkpoints, self.nights) - 1)]
        held = naive_held = thresholds = 0
        shares, possible = np.zeros(number), np.zeros(number)
        for home in range(number):
            validation, groups_of_validation = populations[0].draw(random, self.validation)
            test, groups_of_test = populations[0].draw(random, self.test)
            if self.nights > 1:
                population = _promote(populations, test)
            else:
                population = max(populations, key=lambda one: float(one.right(validation).mean()))
            judged = population.judge(population.fit(validation))
            proposing, deciding = _take(judged, validation), _take(judged, test)
            if not self.ignored:
                proposing = replace(proposing, groups=groups_of_validation)
                deciding = replace(deciding, groups=groups_of_test)
            found = find_thresholds(proposing, deciding, MAX_ERROR, CONFIDENCE)
            held += keeps(judged, found)
            naive_held += _keeps_naively(judged, proposing)
            shares[home] = 1 - review(judged, found).mean()
            coverage, risk = risk_coverage(judged)
            possible[home] = coverage[risk <= MAX_ERROR].max(initial=0)
            thresholds += any(part.threshold is not None for part in found)
        return Outcomes(number, held, naive_held, thresholds, float(shares.mean()), float(possible.mean()))


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of homes."""

    homes: int
    held: int
    """Homes in which no part errs more often than MAX_ERROR among its answered rows."""
    naive_held: int
    """As above, for the lowest threshold with at most MAX_ERROR errors among validation rows."""
    with_threshold: int
    """Homes in which some rows are answered."""
    answered: float
    """The mean share of answered rows."""
    possible: float
    """The share of rows that could be answered if the population were known."""


def review(judged: Judged, parts: Sequence[LabelThreshold]) -> Mask:
    """Whether a person should look at the row."""
    thresholds = {part.label: part.threshold for part in parts}
    others = thresholds.pop(None, None)
    own = {label: threshold for label, threshold in thresholds.items() if label is not None}
    return needs_review(judged.probability, judged.label, own, others)


def keeps(judged: Judged, parts: list[LabelThreshold]) -> bool:
    """Whether no part errs more often than MAX_ERROR among its answered rows, given all rows."""
    labels = [part.label for part in parts]
    for part in parts:
        threshold = 2.0 if part.threshold is None else part.threshold
        answered = in_part(judged.label, part.label, labels) & (judged.probability >= threshold)
        if answered.any() and 1 - judged.right[answered].mean() > MAX_ERROR:
            return False
    return True


def _keeps_naively(judged: Judged, validation: Judged) -> bool:
    order = np.argsort(-validation.probability, kind="stable")
    share = np.cumsum(~validation.right[order]) / np.arange(1, len(order) + 1)
    passing = np.flatnonzero(share <= MAX_ERROR)
    if not len(passing):
        return True
    answered = judged.probability >= validation.probability[order[passing[-1]]]
    return bool(1 - judged.right[answered].mean() <= MAX_ERROR)


def _take(judged: Judged, rows: Rows) -> Judged:
    return Judged(judged.probability[rows], judged.label[rows], judged.right[rows])


def _promote(populations: Sequence[Population], rows: Rows) -> Population:
    """The last champion, if each model is compared with the champion before it on the same rows."""
    champion = populations[0]
    for other in populations[1:]:
        new, old = other.right(rows), champion.right(rows)
        if mcnemar(int((new & ~old).sum()), int((old & ~new).sum()), len(rows), CONFIDENCE).better:
            champion = other
    return champion


def _retrained(population: Population, random: np.random.Generator) -> Population:
    """A model as good as that of the population, which errs on other rows."""
    same = random.random(POPULATION) < 0.5
    logits = population.logits.copy()
    for label in np.unique(population.truth):
        rows = np.flatnonzero((population.truth == label) & ~same)
        logits[rows] = logits[random.permutation(rows)]
    return Population(logits, population.truth)


def one_label(
    labels: int = 4, gain: float = 8.0, scale: float = 1.0, rare: float | None = None, rounded: float = 0.0
) -> Callable[[np.random.Generator], Population]:
    """Logits whose softmax is calibrated, times `scale`. `rare`: the share of the last label; `rounded`: logits are
    multiples of it."""

    def draw(random: np.random.Generator) -> Population:
        shares = np.full(labels, 1 / labels)
        if rare is not None:
            shares = np.append(np.full(labels - 1, (1 - rare) / (labels - 1)), rare)
        strength = random.gamma(2.0, gain / 2, POPULATION)  # rows are easy or hard
        logits = random.normal(0, 1, (POPULATION, labels)) * strength[:, None] + np.log(shares)
        if rounded:
            logits = np.round(logits / rounded) * rounded
        return Population(logits * scale, _draw_labels(random, logits))

    return draw


def no_signal(random: np.random.Generator) -> Population:
    """Logits that say nothing of the label."""
    return Population(random.normal(0, 3, (POPULATION, 4)), random.integers(0, 4, POPULATION))


def same_error_everywhere(random: np.random.Generator, rows: int = POPULATION) -> Population:
    """A share of errors just above MAX_ERROR at every probability: each threshold is a false one."""
    logits = random.normal(0, 2, (rows, 2))
    wrong = np.zeros(rows, np.bool_)
    surest_first = np.argsort(-np.abs(logits[:, 0] - logits[:, 1]))
    wrong[surest_first[np.arange(0, rows, 1 / (MAX_ERROR + 0.001)).astype(np.int64)]] = True
    return Population(logits, np.where(wrong, 1 - logits.argmax(axis=1), logits.argmax(axis=1)))


def same_error_in_groups(random: np.random.Generator) -> Population:
    """The same of groups of ten, whose rows are alike."""
    groups = same_error_everywhere(random, POPULATION // 10)
    logits, truth = np.repeat(groups.logits, 10, axis=0), np.repeat(groups.truth, 10)
    return Population(logits, truth, np.full(POPULATION // 10, 10))


def sure_and_wrong(random: np.random.Generator) -> Population:
    """The surest 5 % of the rows are wrong in one of seven cases, the others rise with the probability."""
    population = one_label(2, 10.0)(random)
    logits, truth = population.logits.copy(), population.truth.copy()
    sure = np.argsort(-np.abs(logits[:, 0] - logits[:, 1]))[: POPULATION // 20]
    wrong = sure[random.random(len(sure)) < 1 / 7]
    truth[wrong] = 1 - logits[wrong].argmax(axis=1)
    return Population(logits, truth)


def shifted_within_labels(random: np.random.Generator) -> Population:
    """Two kinds of rows within each label: of one of them the logits are 3 times too large, and it has label 0 more
    often than the logits tell."""
    first, second = one_label(3, 8.0)(random), one_label(3, 6.0)(random)
    kind = random.random(POPULATION) < 0.3
    logits = np.where(kind[:, None], second.logits * 3, first.logits)
    truth = np.where(kind, _draw_labels(random, second.logits + np.array([1.5, 0, 0])), first.truth)
    return Population(logits, truth)


def many_labels_a_row(random: np.random.Generator) -> Population:
    """Any number of five labels, overconfident."""
    logits = random.normal(-4, 8, (POPULATION, 5))
    return Population(logits * 2, random.random((POPULATION, 5)) < 1 / (1 + np.exp(-logits)))


def in_groups(
    draw: Callable[[np.random.Generator], Population], correlation: float = 1.0, sizes: str = "10"
) -> Callable[[np.random.Generator], Population]:
    """The population in groups. With this chance, a row is a copy of the first one of its group. Sizes: a number;
    `geometric`, ten on average; or `wrong`, 20 if the first row is wrong, else 5."""

    def draw_groups(random: np.random.Generator) -> Population:
        population = draw(random)
        if sizes == "wrong":
            found = np.where(population.right(np.arange(POPULATION)), 5, 20)
        else:
            found = random.geometric(0.1, POPULATION) if sizes == "geometric" else np.full(POPULATION, int(sizes))
        found = found[: np.searchsorted(np.cumsum(found), POPULATION, side="right")]
        found = np.append(found, POPULATION - found.sum()) if found.sum() < POPULATION else found
        first = np.repeat(np.arange(len(found)), found)  # rows 0 to G - 1 are the first ones
        rows = np.where(random.random(POPULATION) < correlation, first, random.permutation(POPULATION))
        return Population(population.logits[rows], population.truth[rows], found)

    return draw_groups


def _draw_labels(random: np.random.Generator, logits: Floats) -> Rows:
    """Labels by their softmax (the Gumbel-max trick)."""
    return np.asarray((logits + random.gumbel(size=logits.shape)).argmax(axis=1))


REGIMES: Mapping[str, Regime] = {
    "usual": Regime(one_label()),
    "few rows": Regime(one_label(), validation=100, test=100),
    "rare label, 3 % of the rows": Regime(one_label(rare=0.03)),
    "ties": Regime(one_label(rounded=2.0)),
    "overconfident": Regime(one_label(scale=4.0)),
    "underconfident": Regime(one_label(scale=0.25)),
    "many labels": Regime(one_label(labels=50, gain=12.0)),
    "no signal": Regime(no_signal),
    "same error at every probability": Regime(same_error_everywhere),
    "sure and wrong": Regime(sure_and_wrong),
    "other shares within labels": Regime(shifted_within_labels),
    "any number of labels a row": Regime(many_labels_a_row),
    "validation chose among 20 checkpoints": Regime(one_label(), validation=200, checkpoints=20),
    "the gate chose among 30 nights' models": Regime(one_label(), nights=30),
    "two labels, 5,000 rows": Regime(one_label(labels=2), validation=5_000, test=5_000),
    "groups of ten": Regime(in_groups(one_label()), validation=300, test=300),
    "groups of ten, half alike": Regime(in_groups(one_label(), 0.5), validation=300, test=300),
    "few groups of ten": Regime(in_groups(one_label()), validation=100, test=100),
    "groups of any size": Regime(in_groups(one_label(), sizes="geometric"), validation=300, test=300),
    "groups that err are large": Regime(in_groups(one_label(), sizes="wrong"), validation=300, test=300),
    "groups, same error at every probability": Regime(same_error_in_groups, validation=300, test=300),
    "groups, any number of labels a row": Regime(in_groups(many_labels_a_row), validation=300, test=300),
    "groups of ten, taken to be independent": Regime(in_groups(one_label()), validation=300, test=300, ignored=True),
}
