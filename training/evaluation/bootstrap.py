"""What figures would have been on other rows like these: the bootstrap (Efron and Tibshirani, 1993).

A draw takes N of N rows, with replacement. It is held as how often each row counts, so that a figure which is made of
sums over rows is made for many draws at once, by one product of matrices.

N rows, D draws, F figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from training.evaluation.confusion import Figure

AT_ONCE = 20_000_000
"""Numbers of draws times rows that are held at a time."""
MOST_AT_ONCE = 100
"""Draws at a time: a metric of the user's may take seconds for each, and a job that says nothing counts as stalled."""


def draws(rows: int, number: int, seed: int) -> Iterator[npt.NDArray[np.int32]]:
    """(D, N) counts, in portions that fit into memory: the same for the same arguments, however it is cut."""
    random = np.random.default_rng(seed)
    for size in portions(rows, number):
        chosen = random.integers(0, rows, size=(size, rows), dtype=np.int32)
        counts = np.empty(chosen.shape, np.int32)
        for count, draw in zip(counts, chosen, strict=True):
            count[:] = np.bincount(draw, minlength=rows)
        yield counts


def portions(rows: int, number: int) -> Iterator[int]:
    """The sizes of portions of so many draws that fit into memory."""
    at_once = max(1, min(AT_ONCE // rows, MOST_AT_ONCE))
    for first in range(0, number, at_once):
        yield min(at_once, number - first)


def drawn(
    figures: Sequence[Figure], rows: int, number: int, seed: int, tell: Callable[[int], None] = lambda done: None
) -> npt.NDArray[np.float64]:
    """(F, D) each of F figures on the same D draws, so that they can be compared draw by draw; nan where a draw's rows
    leave a figure undefined. `tell` is called now and then with the number of draws that are done."""
    found = np.empty((len(figures), number))
    done = 0
    for counts in draws(rows, number, seed):
        for place, figure in enumerate(figures):
            found[place, done : done + len(counts)] = figure(counts)
        done += len(counts)
        tell(done)
    return found
