"""The bootstrap: figures of random draws of the rows (Efron and Tibshirani, 1993).

A draw takes N of N rows, with replacement, and is stored as the number of times that each row counts. So a figure that
is computed from sums over rows is computed for many draws at once, by one matrix product.

N rows, D draws, F figures, K pairs of a true and a predicted label that occur, L labels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]  # (D, N) the number of times that each row counts in each draw
Figure = Callable[[Counts], Floats]
"""Returns the figure of each draw, (D,)."""

MAX_COUNTS = 20_000_000
"""Draws times rows in memory at a time."""
MAX_DRAWS = 100
"""Draws at a time: a user's metric may take seconds for each, and a job without progress counts as stalled."""


def draws(rows: int, number: int, seed: int) -> Iterator[npt.NDArray[np.int32]]:
    """(D, N) counts, in portions that fit into memory. The draws do not depend on the portions."""
    random = np.random.default_rng(seed)
    for size in portions(rows, number):
        chosen = random.integers(0, rows, size=(size, rows), dtype=np.int32)
        counts = np.empty(chosen.shape, np.int32)
        for count, draw in zip(counts, chosen, strict=True):
            count[:] = np.bincount(draw, minlength=rows)
        yield counts


def portions(rows: int, number: int) -> Iterator[int]:
    """The sizes of the portions of `number` draws that fit into memory."""
    size = max(1, min(MAX_COUNTS // rows, MAX_DRAWS))
    for first in range(0, number, size):
        yield min(size, number - first)


def draw_figures(
    figures: Sequence[Figure], rows: int, number: int, seed: int, report: Callable[[int], None] = lambda done: None
) -> npt.NDArray[np.float64]:
    """(F, D) the figures on the same D draws, so that they can be compared draw by draw; nan if a draw's rows leave a
    figure undefined. `report` is called now and then with the number of finished draws."""
    found = np.empty((len(figures), number))
    done = 0
    for counts in draws(rows, number, seed):
        for place, figure in enumerate(figures):
            found[place, done : done + len(counts)] = figure(counts)
        done += len(counts)
        report(done)
    return found


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
