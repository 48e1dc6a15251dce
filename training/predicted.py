"""What metrics are computed from: the rows of a split, and what a model makes of them.

N rows, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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
