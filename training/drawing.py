"""Collators that draw random numbers, made a pure function of the batch: a resumed run draws what it would have drawn.

The Trainer draws batches ahead of the steps that they are for, and restores the generators' states after that. So the
numbers for a batch are not taken from where the generators happen to be, but drawn from (seed, epoch, rank, number of
the batch), in the main process or in a worker alike, and the generators are put back afterwards.

A collator draws from torch's, numpy's or Python's own global generator. One that keeps a generator of its own, or any
other state from batch to batch, is beyond this.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from training.kinds.base import Kind
from training.named import Place

Collate = Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]


class Numbered(list[Any]):
    """The row numbers of a training batch, or its rows' features with these, and what its random numbers are drawn
    from."""

    def __init__(self, items: Iterable[Any], draws_from: Sequence[int], rows: Sequence[int] = ()) -> None:
        super().__init__(items)
        self.draws_from = tuple(draws_from)
        self.rows = list(rows)

    def __reduce__(self) -> tuple[type[Numbered], tuple[list[Any], tuple[int, ...]]]:
        return type(self), (list(self), self.draws_from)  # on its way to a worker


class TrainingCollator:
    """The user's collator for the batches of training, each with random numbers of its own; the kind's for others.

    So that what is evaluated while training is what is predicted afterwards. Raises UserError where the user's gives
    another number of rows than it was given.
    """

    def __init__(self, asked: Collate, own: Collate) -> None:
        self._asked, self._own = asked, own

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if not isinstance(features, Numbered):
            return self._own(features)
        with generators_from(features.draws_from):
            batch = self._asked(list(features))
        try:
            rows = len(batch["labels"])
        except (TypeError, KeyError):
            raise PLACE.refused(
                f"it gave {type(batch).__name__} without 'labels': it must give tensors by name."
            ) from None
        if rows != len(features):
            raise PLACE.refused(f"it gave {rows} rows for {len(features)}: each row must come out once.")
        return batch


def collator(name: str | None, kind: Kind, *settings: Any) -> Collate:
    """What makes batches: the kind's own, or what `training.collator` names, both made with the same `settings`: the
    tokenizer and the multiple to pad to.

    It is a function of a list of features that gives tensors by name, `labels` among them, a line a row. Raises
    UserError where there is none of that name.
    """
    own: Collate = kind.collator(*settings)
    if name is None:
        return own
    made = PLACE.load(name)(*settings)
    if not callable(made):
        raise PLACE.refused(f"{name!r} gave {type(made).__name__}: it must give a function of a batch's features.")
    return TrainingCollator(made, own)


PLACE = Place(
    kind="training",
    where="training.collator",
    example="my_batches:Masked",
    accepted="a function or class that is called with a tokenizer and a multiple to pad to",
    fits=callable,
)


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
