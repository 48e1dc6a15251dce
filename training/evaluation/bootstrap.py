"""The bootstrap: figures of random draws of the rows (Efron and Tibshirani, 1993).

A draw takes N of N rows, with replacement, and is stored as the number of times that each row counts. So a figure that
is computed from sums over rows is computed for many draws at once, by one matrix product.

Two samples of a model's figures may share rows: a row of both is drawn as often in one as in the other, so what is the
same on both sides cancels.

Rows may be in groups, such as all messages of a customer: then a draw takes G of G groups, each with all its rows.

N rows, G groups, D draws, F figures; M rows of a second sample, U different rows of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from training.evaluation.predictions import Figure, Floats, Rows

DRAWS, SEED = 1_000, 0
"""Of reported intervals."""
_ENDS = (0.025, 0.975)
MAX_COUNTS = 20_000_000
"""Draws times rows in memory at a time."""
MAX_DRAWS = 100
"""Draws at a time: a user's metric may take seconds for each, and a job without progress counts as stalled."""


def draws(rows: int, number: int, seed: int, groups: Rows | None = None) -> Iterator[npt.NDArray[np.int32]]:
    """(D, N) counts, in portions that fit into memory. The draws do not depend on the portions.

    `groups`: (N,) the number of each row's group, from 0 to G - 1.
    """
    random = np.random.default_rng(seed)
    units = rows if groups is None else int(groups.max()) + 1
    for size in portions(rows, number):
        chosen = random.integers(0, units, size=(size, units), dtype=np.int32)
        counts = np.empty(chosen.shape, np.int32)
        for count, draw in zip(counts, chosen, strict=True):
            count[:] = np.bincount(draw, minlength=units)
        yield counts if groups is None else counts[:, groups]


def portions(rows: int, number: int) -> Iterator[int]:
    """The sizes of the portions of `number` draws that fit into memory."""
    size = max(1, min(MAX_COUNTS // rows, MAX_DRAWS))
    for first in range(0, number, size):
        yield min(size, number - first)


def draw_figures(
    figures: Sequence[Figure],
    rows: int,
    number: int,
    seed: int,
    report: Callable[[int], None] = lambda done: None,
    groups: Rows | None = None,
) -> npt.NDArray[np.float64]:
    """(F, D) the figures on the same D draws, so that they can be compared draw by draw; nan if a draw's rows leave a
    figure undefined. `report` is called now and then with the number of finished draws; `groups` are those of the
    rows."""
    found = np.empty((len(figures), number))
    done = 0
    for counts in draws(rows, number, seed, groups):
        for place, figure in enumerate(figures):
            found[place, done : done + len(counts)] = figure(counts)
        done += len(counts)
        report(done)
    return found


def interval(values: Floats) -> tuple[float, float]:
    """The ends of the 95 % interval of a figure, from its values on (D,) draws; nan if it is undefined on all of them.
    They have six digits: further ones depend on the machine, by the order of sums."""
    defined = values[np.isfinite(values)]
    if not len(defined):
        return math.nan, math.nan
    low, high = np.quantile(defined, _ENDS)
    return float(f"{low:.6g}"), float(f"{high:.6g}")


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
    """(F, D) the first sample's figures less the second's, on the same draws of the U rows; nan where one is undefined,
    as it is of no rows.

    `figures` are the F figures on either sample; `report` is called with the number of finished draws. Of rows in
    groups, `places` are the numbers of their groups among those of both samples.
    """
    if not all(map(len, places)):
        return np.full((len(figures[0]), number), np.nan)
    units = np.arange(int(max(places[0].max(), places[1].max())) + 1)
    most = max(len(units), *map(len, places))
    found, done = np.empty((len(figures[0]), number)), 0
    for counts in draws(most, number, seed, units):
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
