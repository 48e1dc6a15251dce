"""Homes that train a model each night: how many ever promote one that is no better, or flips too many rows, in a year.

A night's model is compared with the champion on all judged rows of that night. Rows arrive, and none leaves.
R rows, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from training.evaluation.group_tests import chance_of_positive
from training.evaluation.row_groups import Groups
from training.evaluation.significance import alpha_spent

ALPHA, NIGHTS, HOMES = 0.05, 365, 200
FIRST_ROWS, MORE_ROWS = 300, 10
"""Judged rows of the first night, and those that each later night adds."""
CORRELATION = 0.5
"""Of what happens to two rows of a group."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Home:
    """The gate of a home, and its rows."""

    control: Literal["all", "each"] = "all"
    minimum_f1: float | None = None
    max_flips: float | None = None
    """With it, every other night's model is better, and flips a little more of the rows."""
    groups: Literal["none", "new", "growing"] = "none"
    """Of ten rows: a new one each night, or 30 of ten rows each that get a row in turn."""
    counts_groups: bool = True
    """Whether the gate knows the groups."""

    def promotes(self, seed: int) -> bool:
        """Whether any night's model is promoted."""
        from scipy.stats import binom

        random, last = np.random.default_rng(seed), FIRST_ROWS + MORE_ROWS * (NIGHTS - 1)
        numbers = self._numbers(last)
        groups = int(numbers.max()) + 1
        easy = random.beta(6, 1, groups)[numbers]  # how often models get a row right
        positive = (random.random(groups) < 0.5)[numbers]
        champion = self._draw(random, numbers) < easy
        for night in range(NIGHTS):
            rows = slice(0, FIRST_ROWS + MORE_ROWS * night)
            was_right, draw = champion[rows], self._draw(random, numbers[rows])
            if self.max_flips is not None and night % 2:
                share = 1.01 * self.max_flips / champion.mean()
                right = np.where(was_right, draw >= share, draw < 0.6)
            else:
                right = draw < easy[rows]
            gained, lost = right & ~was_right, was_right & ~right
            if gained.sum() <= lost.sum() or not self._reaches_minimum(right, positive[rows]):
                continue
            level = alpha_spent(night + 1, ALPHA) if self.control == "all" else ALPHA
            if self.groups == "none" or not self.counts_groups:
                differing = int(gained.sum() + lost.sum())
                found = [binom.sf(gained.sum() - 1, differing, 0.5)]
                found += [] if self.max_flips is None else [binom.cdf(lost.sum(), len(right), self.max_flips)]
            else:
                found = [*p_values(gained, lost, Groups(numbers[rows]), self.max_flips)]
            if max(found) <= level:
                return True
        return False

    def _numbers(self, rows: int) -> npt.NDArray[np.int64]:
        if self.groups == "none":
            return np.arange(rows)
        if self.groups == "new":
            return np.arange(rows) // MORE_ROWS
        first = np.arange(FIRST_ROWS) // MORE_ROWS
        return np.concatenate([first, np.arange(rows - FIRST_ROWS) % (FIRST_ROWS // MORE_ROWS)])

    def _draw(self, random: np.random.Generator, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """(R,) uniform numbers, of which some are those of the row's group."""
        own = random.random(len(numbers))
        if self.groups == "none":
            return own
        of_group = random.random(int(numbers.max()) + 1)[numbers]
        return np.where(random.random(len(numbers)) < CORRELATION**0.5, of_group, own)

    def _reaches_minimum(self, right: Mask, positive: Mask) -> bool:
        hits = int((right & positive).sum())
        return self.minimum_f1 is None or 2 * hits / (2 * hits + int((~right).sum())) >= self.minimum_f1


def p_values(gained: Mask, lost: Mask, groups: Groups, max_flips: float | None) -> Sequence[float]:
    """The p-values of gain_by_groups, and of highest_share_by_groups at most `max_flips`."""
    seen, sizes, worst = groups.sums(lost), groups.sizes, groups.usual_size
    found = [chance_of_positive([*(seen - groups.sums(gained)), worst])]
    if max_flips is not None:
        found.append(chance_of_positive([*(seen - max_flips * sizes), (1 - max_flips) * worst]))
    return found


GUIDE = Home(minimum_f1=0.8)
"""The gate of docs/how-to/nightly.md."""
TABLE = {
    "the nightly guide's recipe": GUIDE,
    "the same, `control: each`": Home("each", minimum_f1=0.8),
    "and `flips` of 2 %": Home(minimum_f1=0.8, max_flips=0.02),
    "rows in groups of ten, a new one each night": Home(minimum_f1=0.8, groups="new"),
    "the same, and `flips` of 2 %": Home(minimum_f1=0.8, max_flips=0.02, groups="new"),
    "30 groups that get a row in turn, and `flips` of 10 %": Home(minimum_f1=0.8, max_flips=0.1, groups="growing"),
    "rows in groups of ten, taken to be independent": Home(minimum_f1=0.8, groups="new", counts_groups=False),
}
"""Homes by what their gate and rows are."""
