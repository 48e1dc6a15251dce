"""The groups of evaluated rows, such as all messages of a customer, as load_data has stored them. N rows, G groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.data.ipc_files import groups_file, read_table
from training.evaluation.predictions import Floats, Mask, Predictions, Rows

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Groups:
    """The group of each row."""

    numbers: Rows  # (N,) from 0 to G - 1

    @classmethod
    def read(cls, data: Path, split: str, predicted: Predictions | None = None) -> Groups | None:
        """The groups of a split's rows, or of the entries of its predictions, from the folder of load_data; None if its
        rows have none."""
        hashes = read_hashes(data, split, predicted)
        return None if hashes is None else cls.of(hashes)

    @classmethod
    def of(cls, hashes: Hashes) -> Groups:
        """The groups of rows with these (N,) hashes."""
        return cls(np.unique(hashes, return_inverse=True)[1])

    def take(self, rows: Rows | Mask) -> Groups:
        """The groups of these rows, numbered anew."""
        return Groups(np.unique(self.numbers[rows], return_inverse=True)[1])

    @cached_property
    def sizes(self) -> Floats:
        """(G,) rows."""
        return np.bincount(self.numbers).astype(np.float64)

    @property
    def usual_size(self) -> float:
        """The rows in the group of a row drawn at random: the mean over rows, not over groups."""
        return float(np.square(self.sizes).sum() / self.sizes.sum())

    def sums(self, values: npt.ArrayLike) -> Floats:
        """(G,) the sums of (N,) values."""
        weights = np.asarray(values, np.float64)
        return np.bincount(self.numbers, weights, len(self.sizes)).astype(np.float64)

    def design_effect(self, values: npt.ArrayLike) -> float | None:
        """The variance of the mean of (N,) values, relative to that of as many independent rows (Kish, Survey Sampling,
        1965); None if all are equal."""
        given = np.asarray(values, np.float64)
        centred = given - given.mean()
        of_rows = np.square(centred).sum()
        return float(np.square(self.sums(centred)).sum() / of_rows) if of_rows else None


def read_hashes(data: Path, split: str, predicted: Predictions | None = None) -> Hashes | None:
    """(N,) the hash of the group of each row, or of each entry of the predictions, from the folder of load_data; None
    if the rows of the split have none."""
    file = data / groups_file(split)
    if not file.is_file():
        return None
    hashes = np.asarray(read_table(file)["group"].to_numpy())
    return hashes if predicted is None else hashes[predicted.rows_of(np.arange(len(predicted)))]
