"""Paired, one-sided tests of whether one model is better than another on the same rows, and the error levels of
repeated tests on these rows.

mcnemar      For accuracy without a margin. Under equal accuracies, each row that only one of the models gets right is
             as likely to be one's as the other's (McNemar, 1947). Exact for any number of rows.
highest_share  For flips, beside either test. A model is promoted if both reject, each at level alpha. One that is no
             better or flips too many passes one of the two with a chance of at most alpha, so it passes both with at
             most this chance, however they depend on each other (intersection-union: Berger, 1982).
paired       For any other figure, two conditions at once.
             1. A permutation test: exchanging the two models' outputs row by row at random leaves the distribution of
                the gain unchanged if the models are exchangeable (Fisher, 1935; for corpus metrics Noreen, 1989). It is
                exact for any figure, any number of rows, any ties and tails. It applies to margins of 0 and above.
             2. The lower end of a bootstrap interval (Efron and Tibshirani, 1993) of the rows and one row more, the
                worst case. Two models may differ in shape and be equal on average: one gains a little on most rows and
                loses much on rare ones, which may be absent from the test rows. Then a permutation test and a plain
                bootstrap would promote it. A worst case among the rows bounds the mean from below at any number of rows
                (Gaffke, 2005; Learned-Miller and Thomas, 2019): 0 failures in N rows become the rule of three.

training/programs/compare.py chooses the test. A p-value is the larger of the two, and a model is better if it is at
most 1 - confidence. Rows in groups: group_tests.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from training.evaluation.bootstrap import draws, portions
from training.evaluation.predictions import Counts, Figure, Floats

if TYPE_CHECKING:
    from training.evaluation.row_groups import Groups

SEED = 20_260
MIN_TAIL_DRAWS = 50
"""Draws below the lower end of the interval, and permutations in the tail at which the permutation test stops. With so
many, another seed changes little."""
MAX_DRAWS = 20_000
MAX_SLOW_DRAWS = 2_000
MAX_PERMUTED_ROWS = 10**10
"""Upper limit of permutations times rows; MAX_DRAWS permutations are always allowed."""
MAX_PERMUTATIONS = 1_000_000
MAX_NEEDED_ROWS = 10_000_000
USUAL_LEVEL = 0.05
"""Level of the interval for a model that the permutation test has rejected."""
ROUNDING = 1e-12
"""The relative difference up to which two figures count as equal."""
SPENDING_EXPONENT = 1.6
SPENDING_SUM = 2.2857656755644
"""Sum of k ** -SPENDING_EXPONENT over all k: the Riemann zeta function of 1.6."""


@dataclass(frozen=True)
class Significance:
    """The gain of a model over another, and its certainty."""

    gain: float
    at_least: float
    """Lower end of the gain's one-sided interval. At most the margin if the model is not better."""
    p_value: float
    """Upper bound of the probability of such a gain by chance if the true gain is at most the margin."""
    better: bool
    least_p_value: float = 0.0
    """Smallest p-value that the test can give with its number of permutations."""


def alpha_spent(comparison: int, alpha: float) -> float:
    """The error level of the k-th comparison on the same rows, k from 1.

    The levels of all comparisons add up to `alpha`, however many follow. So the chance that any of them promotes a
    model that is no better is at most `alpha`, also if the comparisons depend on each other (the union bound).

    Alpha spending as in Foster and Stine, Alpha-investing (2008), with the series that Tian and Ramdas, Online control
    of the familywise error rate (2021), recommend: late comparisons get more than by 1 / k ** 2.
    """
    return float(alpha * comparison**-SPENDING_EXPONENT / SPENDING_SUM)


def mcnemar(gained: int, lost: int, rows: int, confidence: float) -> Significance:
    """Tests the gain in accuracy of a model that alone is right on `gained` of the rows, while the other alone is right
    on `lost`.

    The interval is that of Clopper and Pearson for the share of `gained` among the rows in which they differ.
    """
    differing = gained + lost
    if not differing:
        return Significance(gain=0.0, at_least=0.0, p_value=1.0, better=False)
    from scipy.stats import binomtest  # slow to import, and the flow needs `alpha_spent` alone

    test = binomtest(gained, differing, 0.5, alternative="greater")
    least_share = test.proportion_ci(confidence, method="exact").low
    return Significance(
        gain=(gained - lost) / rows,
        at_least=float(differing * (2 * least_share - 1) / rows),
        p_value=float(test.pvalue),
        better=bool(test.pvalue <= level_of(confidence)),
    )


def highest_share(rows: int, of: int, confidence: float) -> float:
    """Upper end of the one-sided interval of Clopper and Pearson for a share of which `rows` were seen among `of`."""
    from scipy.stats import beta

    return 1.0 if rows >= of else float(beta.ppf(confidence, rows + 1, of - rows))


def rows_for_share(share: float, confidence: float) -> int:
    """The least number of rows of which none has to be seen for `highest_share` to be at most `share`."""
    return math.ceil(math.log(1 - confidence) / math.log1p(-share) - ROUNDING)


def promotion_chance(
    rows: int, gain: float, differing: float, confidence: float, max_flips: float | None = None
) -> float:
    """The chance that `mcnemar` finds a model better, and with `max_flips` that `highest_share` of its flips is at most
    this, exactly.

    Args:
        rows: the rows on which two models are compared.
        gain: how much more accurate the model is on all rows there are.
        differing: the share of rows that only one of the two has right; at least the gain.
        confidence: as of the tests.
        max_flips: the largest share of rows that only the other model has right; None: any.
    """
    from scipy.stats import binom

    level, differing = level_of(confidence), min(1.0, max(differing, gain))
    ends = binom.ppf((1e-10, 1 - 1e-10), rows, differing)
    numbers = np.arange(max(1, ends[0]), max(1, ends[1]) + 1)  # rows that differ
    least = binom.isf(level, numbers, 0.5) + 1  # of them, gained rows with which the model is better
    if max_flips is not None:
        most_lost = binom.ppf(level, rows, max_flips)
        most_lost -= binom.cdf(most_lost, rows, max_flips) > level
        least = np.maximum(least, numbers - most_lost) if most_lost >= 0 else numbers + 1
    found = binom.sf(least - 1, numbers, (1 + gain / differing) / 2) if differing else np.zeros(len(numbers))
    return float(np.clip(binom.pmf(numbers, rows, differing) @ found, 0, 1))


ChanceOf = Callable[[int, float, float, float, float | None], float]
"""`promotion_chance`, or that of rows in groups."""


def find_detectable_gain(
    rows: int,
    differing: float,
    confidence: float,
    max_flips: float | None = None,
    chance: float = 0.8,
    chance_of: ChanceOf = promotion_chance,
) -> float | None:
    """The smallest gain that is found with this chance; None if there is none."""
    low, high = 0.0, 1.0
    if chance_of(rows, high, differing, confidence, max_flips) < chance:
        return None
    while high - low > 1e-5:
        middle = (low + high) / 2
        enough = chance_of(rows, middle, differing, confidence, max_flips) >= chance
        low, high = (low, middle) if enough else (middle, high)
    return high


def find_needed_rows(
    gain: float,
    differing: float,
    confidence: float,
    max_flips: float | None = None,
    chance: float = 0.8,
    chance_of: ChanceOf = promotion_chance,
) -> int | None:
    """The rows with which the gain is found with this chance, to about 1 %; None if MAX_NEEDED_ROWS are too few."""
    low, high = 0, 1
    while chance_of(high, gain, differing, confidence, max_flips) < chance:
        low, high = high, 2 * high
        if high > MAX_NEEDED_ROWS:
            return None
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        enough = chance_of(middle, gain, differing, confidence, max_flips) >= chance
        low, high = (low, middle) if enough else (middle, high)
    return high


def paired(
    figure: Figure,
    rows: int,
    guards: int = 0,
    *,
    margin: float,
    confidence: float,
    less_is_better: bool = False,
    slow: bool = False,
    cost: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
    groups: Groups | None = None,
) -> Significance:
    """Tests the gain in any figure of one model over another.

    Args:
        figure: The figure of pooled rows: N of the new model, its G worst cases, then both of the other model.
        rows: N.
        guards: G. The worst case with the lowest gain joins the bootstrap.
        margin: The gain must exceed it, in the figure's unit.
        confidence: 1 - the chance of a false promotion.
        less_is_better: Whether a lower figure is better. The gain is positive for a better model either way.
        slow: Whether a draw may take seconds: fewer draws are made then.
        cost: Time of a row in the figure, relative to a row in a sum. A row counts as `cost` rows in MAX_PERMUTED_ROWS.
        report: Called now and then with the numbers of finished draws and of all draws.
        groups: The group of each row, if rows have groups: whole groups are exchanged and drawn.

    The bootstrap leaves out draws with an undefined figure (a label has no row in them). The permutation test counts
    them against the new model. The model is not better if the figure of all rows is undefined, or that of more than
    half of the bootstrap draws.
    """
    pair = _Pair(figure, rows, guards, -1.0 if less_is_better else 1.0, groups)
    gain, level = pair.gain, level_of(confidence)
    if not math.isfinite(gain):
        return Significance(gain=gain, at_least=math.nan, p_value=math.nan, better=False)
    needed = math.ceil(MIN_TAIL_DRAWS / level)
    bootstrap_draws = min(MAX_SLOW_DRAWS if slow else MAX_DRAWS, needed)
    max_permutations = MAX_DRAWS if slow else max(MAX_DRAWS, min(MAX_PERMUTATIONS, MAX_PERMUTED_ROWS // (rows * cost)))
    permutations = min(max_permutations, needed) if margin >= 0 else 0
    p_value = (
        pair.compute_p_value(permutations, lambda done: report(done, permutations + bootstrap_draws))
        if permutations
        else 0.0
    )
    least_p_value = 1 / (1 + permutations) if permutations else 0.0
    if p_value > level:  # rejected: the bootstrap only gives the interval
        bootstrap_draws = min(bootstrap_draws, math.ceil(MIN_TAIL_DRAWS / USUAL_LEVEL))
    total = permutations + bootstrap_draws
    gains = pair.draw_gains(bootstrap_draws, lambda done: report(permutations + done, total))
    report(total, total)
    if 2 * len(gains) < bootstrap_draws:
        return Significance(gain=gain, at_least=math.nan, p_value=1.0, better=False, least_p_value=least_p_value)
    p_value = max(p_value, _share_at_most(gains, margin + pair.rounding))
    better, at_least = p_value <= level, _lower_end(gains, level)
    return Significance(gain, at_least if better else min(at_least, margin), p_value, better, least_p_value)


def level_of(confidence: float) -> float:
    """The largest p-value of a gain: 1 - 0.95 is a little more than 0.05, and 1 - 0.9 a little less than 0.1."""
    return 1 - confidence + ROUNDING


class _Pair:
    """Two models' gain in a figure on any draw of their rows, or of the groups of these. N rows, G guards, D draws."""

    def __init__(self, figure: Figure, rows: int, guards: int, sign: float, groups: Groups | None) -> None:
        self._figure, self._rows, self._guards, self._sign = figure, rows, guards, sign
        self._numbers = None if groups is None else groups.numbers
        self._guard_rows = 1 if groups is None else round(groups.usual_size)
        """How often the worst row counts in a draw of the worst case."""
        all_rows = np.zeros((1, rows + guards), np.int32)
        all_rows[:, :rows] = 1
        new, old = self._figures(all_rows, all_rows)
        self.gain = float(sign * (new - old)[0])
        self.rounding = ROUNDING * max(1.0, abs(float(new[0])), abs(float(old[0])))
        self._guard = self._find_worst_guard(all_rows) if guards else None

    def _figures(self, new: Counts, old: Counts) -> tuple[Floats, Floats]:
        """Returns the figures (D,) of either model for counts (D, N + G)."""
        nothing = np.zeros_like(new)
        return self._figure(np.hstack([new, nothing])), self._figure(np.hstack([nothing, old]))

    def _gains(self, counts: Counts) -> Floats:
        new, old = self._figures(counts, counts)
        return self._sign * (new - old)

    def _find_worst_guard(self, all_rows: Counts) -> int:
        counts = np.repeat(all_rows, self._guards, axis=0)
        counts[np.arange(self._guards), self._rows + np.arange(self._guards)] = self._guard_rows
        gains = self._gains(counts)
        return int(np.argmin(np.where(np.isfinite(gains), gains, np.inf)))

    def draw_gains(self, number: int, report: Callable[[int], None]) -> Floats:
        """Returns the defined gains of bootstrap draws of the rows, or of their groups, and the guard."""
        batches: list[Floats] = []
        has_guard, numbers = int(self._guard is not None), self._numbers
        if numbers is not None and has_guard:  # as one group more
            numbers = np.append(numbers, numbers.max() + 1)
        for draw in draws(self._rows + has_guard, number, SEED, numbers):
            counts = np.zeros((len(draw), self._rows + self._guards), np.int32)
            counts[:, : self._rows] = draw[:, : self._rows]
            if self._guard is not None:
                counts[:, self._rows + self._guard] = self._guard_rows * draw[:, self._rows]
            batches.append(self._gains(counts))
            report(sum(map(len, batches)))
        gains = np.concatenate(batches)
        return gains[np.isfinite(gains)]

    def compute_p_value(self, permutations: int, report: Callable[[int], None]) -> float:
        """The permutation test's p-value, by Monte Carlo draws that stop as soon as MIN_TAIL_DRAWS of them reach the
        gain (Besag and Clifford, 1991): only clear results need many draws."""
        random, done, reached, numbers = np.random.default_rng([SEED, 1]), 0, 0, self._numbers
        units = self._rows if numbers is None else int(numbers.max()) + 1
        for size in portions(self._rows, permutations):
            swapped = random.integers(0, 2, size=(size, units), dtype=np.int8)
            swapped = swapped if numbers is None else swapped[:, numbers]
            counts = [np.zeros((size, 2 * (self._rows + self._guards)), np.int32) for _ in range(2)]
            for target, (first, second) in zip(counts, ((1 - swapped, swapped), (swapped, 1 - swapped)), strict=True):
                target[:, : self._rows] = first
                target[:, self._rows + self._guards :][:, : self._rows] = second
            gains = self._sign * (self._figure(counts[0]) - self._figure(counts[1]))
            hits = np.cumsum(~(gains < self.gain - self.rounding)) + reached  # an undefined one is a hit
            if hits[-1] >= MIN_TAIL_DRAWS:
                return float(MIN_TAIL_DRAWS / (done + np.searchsorted(hits, MIN_TAIL_DRAWS) + 1))
            done, reached = done + size, int(hits[-1])
            report(done)
        return (1 + reached) / (1 + permutations)


def _lower_end(gains: Floats, level: float) -> float:
    """Returns the gain with a share `level` of the draws below it. For levels too low for the number of draws, a normal
    distribution supplies the tail."""
    from scipy.stats import norm

    lowest_level = MIN_TAIL_DRAWS / max(len(gains), MIN_TAIL_DRAWS)
    end = float(np.quantile(gains, max(level, lowest_level)))
    return end if level >= lowest_level else min(end, float(gains.mean() - norm.isf(level) * gains.std()))


def _share_at_most(gains: Floats, margin: float) -> float:
    """Returns the level at which `_lower_end` is the margin."""
    from scipy.stats import norm

    lowest_level = MIN_TAIL_DRAWS / max(len(gains), MIN_TAIL_DRAWS)
    share = float((1 + np.count_nonzero(gains <= margin)) / (1 + len(gains)))
    if share >= lowest_level:
        return share
    spread = float(gains.std())
    return min(lowest_level, float(norm.sf((gains.mean() - margin) / spread)) if spread else 1 / (1 + len(gains)))
