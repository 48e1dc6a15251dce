"""Collators that draw random numbers, made a pure function of the batch: a resumed run draws what it would have drawn.

The Trainer draws batches ahead of the steps that they are for, and restores the generators' states after that. So the
numbers for a batch are not taken from where the generators happen to be, but drawn from (seed, epoch, rank, number of
the batch), in the main process or in a worker alike, and the generators are put back afterwards.

A collator draws from torch's, numpy's or Python's own global generator. One that keeps a generator of its own, or any
other state from batch to batch, is beyond this.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Numbered(list[Any]):
    """The row numbers of a training batch, or its rows' features with these, and what its random numbers are drawn
    from."""

    def __init__(self, items: Iterable[Any], draws_from: Sequence[int], rows: Sequence[int] = ()) -> None:
        super().__init__(items)
        self.draws_from = tuple(draws_from)
        self.rows = list(rows)

    def __reduce__(self) -> tuple[type[Numbered], tuple[list[Any], tuple[int, ...]]]:
        return type(self), (list(self), self.draws_from)  # on its way to a worker


@contextmanager
def generators_from(numbers: Sequence[int]) -> Iterator[None]:
    """Inside, the global generators of torch (CPU), numpy and Python begin at these numbers; afterwards they are put
    back to where they were."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    words = np.random.SeedSequence(list(numbers)).generate_state(3, np.uint32).tolist()
    torch.default_generator.manual_seed(words[0])  # not torch.manual_seed, which takes the GPUs' along
    np.random.seed(words[1])
    random.seed(words[2])
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def random_states() -> dict[str, Any]:
    """Where all generators of this process are, in types that torch loads without running code."""
    drawn: Any = np.random.get_state()
    name, keys, *rest = drawn
    states = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest), "cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: dict[str, Any]) -> None:
    """Put them back to where they were."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
