"""What figures would have been on other rows like these: the bootstrap (Efron and Tibshirani, 1993).

A draw takes N of N rows, with replacement. It is held as how often each row counts, so that a figure which is made of
sums over rows is made for many draws at once, by one product of matrices.

N rows, L labels, D draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

AT_ONCE = 20_000_000
"""Numbers of draws times rows that are held at a time."""

Figure = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float64]]
"""Takes (D, N), how often each row counts in each draw; gives (D,), the figure of each draw."""


@dataclass(frozen=True)
class Predicted:
    """Rows of one split, and what a model makes of them."""

    references: npt.NDArray[np.int64]  # (N,) true labels, as places among `labels`
    predictions: npt.NDArray[np.int64]  # (N,)
    probabilities: npt.NDArray[np.float64]  # (N, L) each row adds up to one
    labels: Sequence[str]

    def __len__(self) -> int:
        return len(self.references)

    def of(self, rows: npt.NDArray[np.int64]) -> Predicted:
        """These rows alone, in this order; a row may come several times."""
        return Predicted(self.references[rows], self.predictions[rows], self.probabilities[rows], self.labels)


def draws(rows: int, number: int, seed: int) -> Iterator[npt.NDArray[np.int32]]:
    """(D, N) counts, in portions that fit into memory: the same for the same arguments, however it is cut."""
    random = np.random.default_rng(seed)
    at_once = max(1, AT_ONCE // rows)
    for first in range(0, number, at_once):
        chosen = random.integers(0, rows, size=(min(at_once, number - first), rows), dtype=np.int32)
        yield np.stack([np.bincount(draw, minlength=rows) for draw in chosen]).astype(np.int32)


def drawn(figures: Sequence[Figure], rows: int, number: int, seed: int) -> npt.NDArray[np.float64]:
    """(F, D) each of F figures on the same D draws, so that they can be compared draw by draw."""
    return np.concatenate(
        [np.stack([figure(counts) for figure in figures]) for counts in draws(rows, number, seed)], axis=1
    )
