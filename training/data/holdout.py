"""Rows held out of train for splits that the source lacks, chosen by the hash of their text alone, or of their group
(row_groups.py); those of a time are in row_times.py.

Equal texts or groups stay together, and a row stays in its split if others are added or reordered: the next run
evaluates on the same rows.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from training.data.duplicates import Hashes

if TYPE_CHECKING:
    from training.recipe import Data

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def held_out_shares(data: Data, given: Container[str]) -> dict[str, float]:
    """Returns the splits to cut from train, and their sizes: shares, or numbers of rows; `given` are those that the
    source has."""
    sizes = {"validation": data.validation_size, "test": data.test_size}
    held_out = ["validation", *(["test"] if data.holds_out_test else [])]
    return {split: sizes[split] for split in held_out if split not in given}


def split_masks(hashes: Hashes, shares: Mapping[str, float], rest: str) -> dict[str, Mask | None]:
    """Returns the mask of the rows of each split; `rest` gets all other rows, and None means all rows."""
    if not shares:
        return {rest: None}
    # The hashes are uniform over [0, 1): each split takes an interval, test the last one.
    spread = hashes / 2.0**64
    masks: dict[str, Mask] = {}
    left = np.ones(len(hashes), bool)
    if "test" in shares:
        masks["test"] = spread >= 1 - shares["test"]
        left &= ~masks["test"]
    if "validation" in shares:
        masks["validation"] = left & (spread < shares["validation"])
        left &= ~masks["validation"]
    return {rest: left, **{split: masks[split] for split in shares}}
