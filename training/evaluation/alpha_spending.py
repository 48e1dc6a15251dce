"""Error levels of many comparisons on the same test rows."""

from __future__ import annotations

EXPONENT = 1.6
_SUM = 2.2857656755644
"""Of k ** -EXPONENT over all k: the Riemann zeta function of 1.6."""


def level_of(comparison: int, alpha: float) -> float:
    """The error level of the k-th comparison, k from 1. The levels of all comparisons add up to `alpha`, however many
    follow, so the chance that any of them promotes a model that is no better is at most `alpha`, whatever depends on
    what (the union bound).

    Alpha spending as in Foster and Stine, Alpha-investing (2008), with the series that Tian and Ramdas, Online control
    of the familywise error rate (2021), recommend: late comparisons get more than by 1 / k ** 2.
    """
    return float(alpha * comparison**-EXPONENT / _SUM)
