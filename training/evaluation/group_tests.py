"""Tests and bounds for rows in groups, such as all messages of a customer. Rows of one group may be alike, so a group
takes the place of a row of significance.py. N rows, G groups.

mean bound   For accuracy and flips: Gaffke's bound of a mean (2005; Learned-Miller and Thomas, 2019). The G sums of the
             groups, and one more group as the worst case, get random weights, which are independent and exponential;
             the bound is a quantile of the weighted mean. Of groups of one row each, it is McNemar's exact test and
             Clopper and Pearson's exact interval. For groups of several rows no proof is known. It fails if the groups
             that are lost are rare and much larger than those that are seen.
paired       Other figures: significance.py exchanges and draws whole groups, and repeats the worst row as often as the
             worst case has rows.

The worst case has as many rows as the group of a row drawn at random. One with the rows of the largest group would
reject nearly everything if groups differ in size, and the mean size promotes too often (`python -m tests.gate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.evaluation.row_groups import Groups
from training.evaluation.significance import ROUNDING, Significance, level_of

STEP, STEPS = 0.05, 280
"""Of the integration over the hyperbolic arc sine of the frequency: with twice as many steps, no digit changes."""
BISECTIONS, BOUND_BISECTIONS = 45, 30
"""Of the saddle point, and of bounds: these are exact to a billionth."""


@dataclass(frozen=True)
class Clusters:
    """Rows in groups, as far as the power of these tests depends on them."""

    size: float
    """The usual size of a group."""
    design_effect: float
    """Of the gains: 1 if rows of a group differ like any others, the size if all of them gain or lose together."""

    def promotion_chance(
        self, rows: int, gain: float, differing: float, confidence: float, max_flips: float | None = None
    ) -> float:
        """The chance of significance.promotion_chance, by the normal approximation."""
        from scipy.stats import norm

        level, worst = 1 - confidence, self.size / rows

        def chance_below(limit: float, mean: float, variance: float) -> float:
            """That the upper bound of a mean is below the limit."""
            spread = math.sqrt(self.design_effect * variance / rows)
            above = max(worst + norm.isf(level) * math.hypot(spread, worst), -math.log(level) * worst)
            return float(norm.cdf((limit - above - mean) / spread)) if spread else float(mean + above < limit)

        differing = min(1.0, max(differing, gain))
        found = chance_below(0.0, -gain, differing - gain**2)
        if max_flips is None:
            return found
        lost = (differing - gain) / 2
        return found * chance_below(max_flips, lost, lost * (1 - lost))


def gain_by_groups(gains: npt.ArrayLike, groups: Groups, margin: float, confidence: float) -> Significance:
    """Tests whether the mean of (N,) gains between -1 and 1 is more than the margin."""
    values = np.asarray(gains, np.float64)
    sums, sizes, worst = groups.sums(values), groups.sizes, groups.usual_size

    def p_value(mean: float) -> float:
        """Of a true mean of at most this."""
        return chance_of_positive([*(mean * sizes - sums), (1 + mean) * worst])

    gain, level = float(values.mean()), level_of(confidence)
    found = p_value(margin)
    at_least = _find_crossing(lambda mean: p_value(mean) <= level, -1.0, gain)
    better = found <= level
    return Significance(gain, at_least if better else min(at_least, margin), found, better)


def highest_share_by_groups(
    rows: npt.ArrayLike, groups: Groups, confidence: float, worst: float | None = None
) -> float:
    """Upper end of the one-sided interval of the share of rows of which (N,) are seen. `worst` is the size of the worst
    case; None: the usual size of the groups."""
    seen = float(np.asarray(rows, np.float64).mean())
    return -_find_crossing(lambda share: chance_of_so_few(rows, groups, -share, worst) <= 1 - confidence, -1.0, -seen)


def chance_of_so_few(rows: npt.ArrayLike, groups: Groups, share: float, worst: float | None = None) -> float:
    """The p-value of the claim that at least this share of all rows is seen, given (N,) those that are."""
    seen, sizes, worst = groups.sums(rows), groups.sizes, groups.usual_size if worst is None else worst
    return chance_of_positive([*(seen - share * sizes), (1 - share) * worst])


def groups_for_gain(groups: Groups, confidence: float, margin: float = 0.0) -> int:
    """The least number of groups of such sizes whose rows must all be gained for `gain_by_groups` to find a gain."""
    odds = (1 - margin) / (1 + margin) * groups.sizes / groups.usual_size
    return math.ceil(-math.log(1 - confidence) / np.log1p(odds).mean() - ROUNDING)


def groups_for_share(groups: Groups, share: float, confidence: float) -> int:
    """The least number of groups of such sizes, without any row seen, for `highest_share_by_groups` to be at most
    `share`."""
    odds = share / (1 - share) * groups.sizes / groups.usual_size
    return math.ceil(-math.log(1 - confidence) / np.log1p(odds).mean() - ROUNDING)


def _find_crossing(is_ruled_out: Callable[[float], bool], low: float, high: float) -> float:
    """The largest value that is ruled out, with all values below it; `low` if there is none."""
    for _ in range(BOUND_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_ruled_out(middle) else (low, middle)
    return low


def chance_of_positive(factors: npt.ArrayLike) -> float:
    """The chance that the sum of independent exponential variables of mean 1, each times one of the factors, is
    positive: the inverse Laplace transform of their moment generating function, along the line through its saddle
    point, where relative precision is kept in the tails too."""
    factor, count = np.unique(np.asarray(factors, np.float64), return_counts=True)
    factor, count = factor[factor != 0], count[factor != 0]
    if not len(factor) or factor[-1] < 0:
        return 0.0
    if factor[0] > 0:
        return 1.0
    low, high = 1 / factor[0], 1 / factor[-1]  # the function is finite between them
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        rises = (count * factor / (1 - middle * factor)).sum() > 0
        low, high = (low, middle) if rises else (middle, high)
    if high <= 0:
        return 1 - chance_of_positive(-np.repeat(factor, count))
    spread = 1 / math.sqrt((count * np.square(factor)).sum())
    through = max(high, min(0.5 / factor[-1], spread))  # away from the pole at 0
    scale = 1 / math.sqrt((count * np.square(factor / (1 - through * factor))).sum())
    along = STEP * np.arange(STEPS)
    line = through + 1j * scale * np.sinh(along)
    logarithms = -(count * np.log(1 - line[:, None] * factor)).sum(axis=1)
    heights = (np.exp(logarithms) / line).real * scale * np.cosh(along)
    return float(np.clip(STEP * (heights.sum() - heights[0] / 2) / math.pi, 0.0, 1.0))
