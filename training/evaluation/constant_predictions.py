"""Rivals of a first model, which need no training of a model: constant predictions, the same for every row and learned
from the training rows, or another method such as BM25. A task type's `baseline` returns them;
training/evaluation/baseline.py chooses the best by a metric.

N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.data.ipc_files import read_table
from training.evaluation.predictions import Numbers, Predictions

MOST_CONSTANTS = 20
"""The most frequent predictions, which are tried."""

NEARLY = 0.1
"""The share of the labels' variation below which predictions count as constant."""


@dataclass(frozen=True)
class Rival:
    """A method of prediction that a first model must beat."""

    name: str
    """The method or its prediction, as a short text."""
    predict: Callable[[Any, str], Predictions]
    """Takes the rows of a split and the split's name; returns the rows with the rival's predictions."""

    @property
    def description(self) -> str:
        """The rival in reports and messages, such as "BM25"."""
        return self.name


class Constant(Rival):
    """One prediction for every row."""

    @property
    def description(self) -> str:
        return f"the constant answer {self.name}"


@dataclass(frozen=True)
class Baseline:
    """The rivals of a task type's models, at least one; the first is used if no metric can choose."""

    rivals: Sequence[Rival]
    train: Predictions | None = None
    """Training rows, on which the best rival is chosen; their predictions are not read. None: no choice."""
    counts: npt.NDArray[np.int64] | None = None
    """(N,) how often each row of `train` counts; None: once."""


def read_column(file: Path, name: str) -> pa.ChunkedArray:
    """Returns a column of an Arrow file, memory-mapped."""
    return read_table(file)[name]


def constant_numbers(file: Path, name: str) -> Baseline:
    """The mean of a column of numbers, or their median."""
    numbers = read_column(file, name).to_numpy()

    def predict(number: float, rows: Numbers, split: str) -> Numbers:
        return Numbers(rows.references, np.full(len(rows), number))

    middles = {"mean": float(numbers.mean()), "median": float(np.median(numbers))}
    constants = [Constant(f"{value:.4g} (the {name})", partial(predict, value)) for name, value in middles.items()]
    distinct, counts = np.unique(numbers, return_counts=True)
    return Baseline(constants, Numbers(distinct, distinct), counts)


def sample_evenly(number: int, most: int) -> npt.NDArray[np.int64]:
    """Returns at most `most` of the positions 0 … number - 1, evenly spaced."""
    return np.linspace(0, number - 1, min(most, number)).astype(np.int64)


def most_frequent(counts: npt.NDArray[np.int64]) -> list[int]:
    """Returns the indices of the largest counts, in descending order; of equal counts the lower index first. Index 0 if
    all counts are 0."""
    order = np.argsort(-counts, kind="stable")[:MOST_CONSTANTS]
    return [int(place) for place in order if counts[place]] or [0]


def smooth_counts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns counts as probabilities, with one added to each count (Laplace): an outcome that does not occur in
    training is unlikely, not impossible."""
    return np.asarray((counts + 1.0) / (counts.sum() + len(counts)))


def quote_names(names: Sequence[str], most: int = 5) -> str:
    """Returns `'war', 'horror' and 3 more`, for example."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def shorten(text: str, most: int = 60) -> str:
    """Returns the text as a Python literal, shortened for a table."""
    return repr(text if len(text) <= most else f"{text[: most - 1]}…")


def is_constant(rows: Predictions) -> bool:
    """Whether every row has the same prediction."""
    return rows.codes is not None and len(np.unique(rows.codes[1])) == 1


def nearly_constant(rows: Predictions) -> bool:
    """Whether (nearly) all rows have the same prediction although their labels differ. Numbers: their standard
    deviation is below a tenth of the labels'. Others: the rows without the most frequent prediction are fewer than a
    tenth of those without the most frequent label."""
    if rows.codes is None or not len(rows):
        return False
    truth, given = rows.codes
    if truth.dtype.kind == "f":
        return bool(given.std() < NEARLY * truth.std())
    others = [len(codes) - np.unique(codes, return_counts=True)[1].max(initial=0) for codes in (truth, given)]
    return bool(others[1] < NEARLY * others[0])


def advice(split: str, *, weights: bool) -> str:
    """Advice for a model with nearly constant predictions; `weights`: whether labels can have weights."""
    message = (
        f"the predictions for {split} are the same for (nearly) all rows, so the model has not learned to distinguish "
        "them. Usually one of these helps: more epochs or rows; a higher training.learning_rate if the loss did not "
        "fall, a lower one with training.warmup_steps if it jumped"
    )
    return message + ("; training.class_weights: balanced if labels are rare." if weights else ".")
