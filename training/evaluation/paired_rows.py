"""The difference of a model's figures between two samples that may share rows, by one bootstrap of both.

A row of both samples is drawn as often in one as in the other, so what is the same on both sides cancels.

N rows of the first sample, M of the second, U different rows of both, D draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from training.evaluation import bootstrap
from training.evaluation.confusion import Figure, Floats

Rows = npt.NDArray[np.int64]


def match_rows(first: Sequence[str], second: Sequence[str]) -> tuple[Rows, Rows, int]:
    """For the contents of both samples' rows, the place (N,) and (M,) of each in all U different rows, and the number
    of rows that both have. Of equal rows in one sample, each is matched once."""
    waiting: dict[str, list[int]] = {}
    for place, content in enumerate(first):
        waiting.setdefault(content, []).append(place)
    second_places, used = [], len(first)
    for content in second:
        if waiting.get(content):
            second_places.append(waiting[content].pop(0))
        else:
            second_places.append(used)
            used += 1
    shared = len(first) + len(second) - used
    return np.arange(len(first), dtype=np.int64), np.array(second_places, np.int64), shared


def draw_differences(
    figures: tuple[Sequence[Figure], Sequence[Figure]],
    places: tuple[Rows, Rows],
    number: int,
    seed: int,
    report: Callable[[int], None] = lambda done: None,
) -> Floats:
    """(F, D) the first sample's figures less the second's, on the same draws of the U rows; nan where one is undefined.

    `figures` are the F figures on either sample; `report` is called with the number of finished draws.
    """
    rows = int(max(places[0].max(), places[1].max())) + 1
    found, done = np.empty((len(figures[0]), number)), 0
    for counts in bootstrap.draws(rows, number, seed):
        samples = [np.ascontiguousarray(counts[:, of_sample]) for of_sample in places]
        for line, pair in enumerate(zip(*figures, strict=True)):
            first, second = (_of_filled(figure, sample) for figure, sample in zip(pair, samples, strict=True))
            found[line, done : done + len(counts)] = first - second
        done += len(counts)
        report(done)
    return found


def _of_filled(figure: Figure, counts: Any) -> Floats:
    """The figure on draws; nan on those that took no row of the sample."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts.sum(axis=1) > 0, figure(counts), np.nan)
