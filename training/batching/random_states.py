"""Random generators whose state depends only on the batch: a resumed run draws the same numbers as an unbroken one.

The Trainer draws batches ahead of their steps, and restores the generators' states after that. So the generators are
seeded with (seed, epoch, rank, number of the batch) for each batch, in the main process and in workers, and restored
afterwards. This covers the global generators of torch, numpy and Python. A collator with its own generator, or with
other state between batches, is not reproducible.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class SeededBatch(list[Any]):
    """The row numbers of a training batch, or its rows' features, with the seeds of its random numbers."""

    def __init__(self, items: Iterable[Any], seeds: Sequence[int], rows: Sequence[int] = ()) -> None:
        super().__init__(items)
        self.seeds = tuple(seeds)
        self.rows = list(rows)

    def __reduce__(self) -> tuple[type[SeededBatch], tuple[list[Any], tuple[int, ...]]]:
        return type(self), (list(self), self.seeds)  # row numbers on their way to a worker


@contextmanager
def seed_generators(seeds: Sequence[int]) -> Iterator[None]:
    """Inside, the global generators of torch (CPU), numpy and Python start from these seeds; afterwards their states
    are restored."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    words = np.random.SeedSequence(list(seeds)).generate_state(3, np.uint32).tolist()
    torch.default_generator.manual_seed(words[0])  # torch.manual_seed would also seed GPUs
    np.random.seed(words[1])
    random.seed(words[2])
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def random_states() -> dict[str, Any]:
    """The states of all generators of this process, in types that torch loads without running code."""
    drawn: Any = np.random.get_state()
    name, keys, *rest = drawn
    states = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest), "cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
