"""Confusion counts: rows by true and predicted label, for many bootstrap draws at once.

N rows, D draws, K pairs of a true and a predicted label that occur, L labels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]  # (D, N) the number of times that each row counts in each draw
Figure = Callable[[Counts], Floats]
"""Returns the figure of each draw, (D,)."""


class Confusion:
    """The pairs of a true and a predicted label that occur, and the number of rows of each in each draw."""

    def __init__(
        self, references: npt.NDArray[np.int64], predictions: npt.NDArray[np.int64], labels: Sequence[str]
    ) -> None:
        self.labels = labels
        codes = references * len(labels) + predictions
        self._order = np.argsort(codes, kind="stable")
        pairs, self._starts = np.unique(codes[self._order], return_index=True)
        self.true, self.predicted = np.divmod(pairs, len(labels))  # (K,) each
        self._last: tuple[weakref.ref[Counts], Floats] | None = None

    def rows(self, counts: Counts) -> Floats:
        """(D, K)"""
        if self._last is None or self._last[0]() is not counts:  # several metrics use the same counts
            rows = np.add.reduceat(np.take(counts, self._order, axis=1), self._starts, axis=1, dtype=np.int64)
            self._last = weakref.ref(counts), rows.astype(np.float64)
        return self._last[1]

    def by_label(self, counts: Counts) -> tuple[Floats, Floats, Floats]:
        """(D, L) rows with each label, rows predicted to have it, and rows of both."""
        rows, label = self.rows(counts), np.arange(len(self.labels))
        true, predicted = ((which[:, None] == label).astype(np.float64) for which in (self.true, self.predicted))
        return rows @ true, rows @ predicted, rows @ (true * predicted)
