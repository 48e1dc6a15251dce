"""Whether other settings are better, or only another seed: the gain over a recipe, of which both have the same S seeds.

Seeds and rows are random, and each pair of them has an effect of its own (two-way random effects; Cameron, Gelbach and
Miller, Robust inference with multiway clustering, 2011). The variance of the mean gain is

    the variance of the seeds' gains / S  +  that of the mean gain over bootstrap draws of the rows  -  the part that
    both contain: the variance of a single seed's gain over the draws exceeds that of the mean by it (S - 1) times

and at least each of the first two. The interval is that of Student's t, with the degrees of freedom of Satterthwaite
(1946).

S seeds, D draws of the rows or of their groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.evaluation.predictions import Floats

CONFIDENCE = 0.95
MOST_SEEDS = 1_000
"""More are not suggested."""


@dataclass(frozen=True)
class SeedGain:
    """The mean gain over seeds and rows, with the parts of its variance."""

    gain: float
    of_seeds: float
    """Variance of the mean gain by the seeds, the rows being these."""
    of_rows: float
    """Variance of the mean gain by the rows, the seeds being these."""
    of_both: float
    """The part that both contain: of rows by the seeds."""
    seeds: int
    rows: int
    """Independent rows, or groups of rows."""

    @classmethod
    def of(cls, gains: Floats, drawn: Floats, rows: int) -> SeedGain:
        """From the gains (S,) of the seeds, and those on the draws (S, D)."""
        seeds = len(gains)
        single, mean = float(drawn.var(axis=1).mean()), float(drawn.mean(axis=0).var())
        both = min(max(0.0, (single - mean) / (seeds - 1)), mean)
        return cls(float(gains.mean()), float(gains.var(ddof=1) / seeds), mean, both, seeds, rows)

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the interval at CONFIDENCE."""
        half = self._half_width(self.seeds)
        return self.gain - half, self.gain + half

    def _half_width(self, seeds: int) -> float:
        """Half the width of the interval of so many seeds."""
        from scipy.stats import t

        of_seeds, of_rows = (part * self.seeds / seeds for part in (self.of_seeds, self.of_both))
        of_rows += self.of_rows - self.of_both
        variance = max(of_seeds + of_rows - self.of_both * self.seeds / seeds, of_seeds, of_rows)
        if not variance:
            return 0.0
        freedom = variance**2 / (of_seeds**2 / (seeds - 1) + of_rows**2 / max(1, self.rows - 1))
        return float(t.isf((1 - CONFIDENCE) / 2, freedom) * math.sqrt(variance))

    @property
    def needed_seeds(self) -> int | None:
        """The seeds with which the interval would not contain 0 if the gain were this one; None if the rows alone are
        too few for that, or MOST_SEEDS."""
        low, high = self.seeds, MOST_SEEDS
        if self._half_width(high) >= abs(self.gain):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._half_width(middle) < abs(self.gain) else (middle + 1, high)
        return low
