"""Random samples of rows that are read one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

SEED = 0
Row = TypeVar("Row")


class Reservoir(Generic[Row]):
    """At most `most` of all rows that are added, each row equally likely (reservoir sampling). Equal rows in the same
    order give the same sample, however they are divided into parts."""

    def __init__(self, most: int) -> None:
        self._most, self._random = most, np.random.default_rng(SEED)
        self._kept: list[Row] = []
        self.total = 0
        """The number of rows that were added."""

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the next rows."""
        free = self._most - len(self._kept)
        self._kept += rows[:free]
        later = rows[free:]
        numbers = np.arange(self.total + len(rows) - len(later), self.total + len(rows)) + 1
        places = np.floor(self._random.random(len(later)) * numbers).astype(np.int64)
        for number in np.flatnonzero(places < self._most).tolist():
            self._kept[places[number]] = later[number]
        self.total += len(rows)

    def draw(self) -> list[Row]:
        """The sample in a random order. Draws once: later calls give other orders."""
        return [self._kept[place] for place in self._random.permutation(len(self._kept)).tolist()]
