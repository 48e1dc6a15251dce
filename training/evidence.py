"""Whether one model is better than another on the same rows, or may only look so. Both tests are paired and one-sided.

mcnemar      for accuracy, exact: had both models the same chances, each of the rows that only one of them gets right
             would be the one's or the other's as a fair coin falls (McNemar, 1947)
bootstrap    for any figure: the gain on other rows like these, drawn from these (Efron and Tibshirani, 1993)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from training.resampling import Figure, drawn

SEED = 20_260
DRAWS_BEYOND = 50
"""Draws that lie below the lower end of the interval: enough that another seed moves it little."""
MOST_DRAWS = 20_000
ROUNDING = 1e-12
"""What two figures that are equal may differ by."""


@dataclass(frozen=True)
class Evidence:
    """By how much a model is better than another, and how sure that is."""

    gain: float
    at_least: float
    """The lower end of the gain's one-sided interval."""
    p_value: float
    """How likely such a gain would be by chance, were the true one no more than the margin."""
    better: bool


def mcnemar(gained: int, lost: int, rows: int, confidence: float) -> Evidence:
    """The gain in accuracy of a model that alone gets `gained` of the rows right, where the other alone gets `lost`.

    The interval is that of Clopper and Pearson for the share of `gained` among the rows in which they differ.
    """
    differing = gained + lost
    if not differing:
        return Evidence(gain=0.0, at_least=0.0, p_value=1.0, better=False)
    test = binomtest(gained, differing, 0.5, alternative="greater")
    least_share = test.proportion_ci(confidence, method="exact").low
    return Evidence(
        gain=(gained - lost) / rows,
        at_least=float(differing * (2 * least_share - 1) / rows),
        p_value=float(test.pvalue),
        better=bool(test.pvalue <= 1 - confidence),
    )


def bootstrap(
    new: Figure,
    old: Figure,
    rows: int,
    *,
    margin: float,
    confidence: float,
    less_is_better: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Evidence:
    """The gain in any figure, from draws that both models share; the interval has its percentiles.

    Draws in which a figure is no number (a label has no row in them) are passed over. Where a figure of all rows is
    none, the gain is none and nothing is better. `tell` hears now and then how many draws are done, and of how many.
    """
    sign = -1.0 if less_is_better else 1.0
    once = np.ones((1, rows), dtype=np.int32)
    gain = sign * float(new(once)[0] - old(once)[0])
    number = min(MOST_DRAWS, math.ceil(DRAWS_BEYOND / (1 - confidence)))
    of_new, of_old = drawn([new, old], rows, number, SEED, lambda done: tell(done, number))
    gains = sign * (of_new - of_old)
    gains = gains[np.isfinite(gains)]
    if not (math.isfinite(gain) and len(gains)):
        return Evidence(gain=gain, at_least=math.nan, p_value=math.nan, better=False)
    at_least = float(np.quantile(gains, 1 - confidence))
    by_chance = int(np.count_nonzero(gains <= margin + ROUNDING))
    return Evidence(
        gain=gain,
        at_least=at_least,
        p_value=(1 + by_chance) / (1 + len(gains)),
        better=at_least > margin + ROUNDING,
    )
