"""The bootstrap: figures of random draws of the rows (Efron and Tibshirani, 1993).

A draw takes N of N rows, with replacement, and is stored as the number of times that each row counts. So a figure that
is computed from sums over rows is computed for many draws at once, by one matrix product.

N rows, D draws, F figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from training.evaluation.confusion import Figure

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
