"""Differences of a model's figures between two samples that may share rows."""

from __future__ import annotations

import numpy as np
import pytest

from training.evaluation.bootstrap import draw_differences, match_rows
from training.evaluation.predictions import Counts, Floats


def mean(values: Floats) -> object:
    """A figure: the mean of the drawn rows."""
    return lambda counts: (counts @ values) / counts.sum(axis=1)


def test_equal_rows_are_matched_once_each() -> None:
    first, second, shared = match_rows(["a", "b", "a", "c"], ["a", "d", "a", "a"])
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [0, 4, 2, 5] and shared == 2


def test_the_same_rows_have_no_difference_on_any_draw() -> None:
    values = np.random.default_rng(0).random(200)
    rows = [str(number) for number in range(200)]
    first, second, _ = match_rows(rows, rows[::-1])
    draws = draw_differences(([mean(values)], [mean(values[::-1])]), (first, second), 300, 0)
    assert np.abs(draws).max() < 1e-12


def test_no_rows_have_no_difference_from_any() -> None:
    """Such as queries that all lack a relevant document: no row can be drawn."""
    values, nothing = np.random.default_rng(0).random(20), np.empty(0)
    draws = draw_differences(([mean(nothing)], [mean(values)]), (np.arange(0), np.arange(20)), 10, 0)
    assert draws.shape == (1, 10) and np.isnan(draws).all()


@pytest.mark.parametrize("shared", [0, 150])
def test_the_interval_has_the_true_difference_in_19_of_20_cases(shared: int) -> None:
    """The figure drops by 0.1 between two samples of 300 rows, some of which are the same rows, with less value."""
    covered, trials = 0, 60
    for trial in range(trials):
        random = np.random.default_rng(trial)
        old = random.random(300)
        new = np.concatenate([old[:shared], random.random(300 - shared)]) - 0.1
        names = [[f"old{n}" for n in range(300)], [f"old{n}" if n < shared else f"new{n}" for n in range(300)]]
        first, second, found = match_rows(names[1], names[0])
        draws = draw_differences(([mean(new)], [mean(old)]), (first, second), 300, trial)
        low, high = np.quantile(draws, [0.025, 0.975])
        covered += low <= -0.1 <= high
        assert found == shared
    assert covered >= 52


def test_shared_rows_make_the_interval_narrower() -> None:
    random, widths = np.random.default_rng(1), []
    values = random.random(300)
    for shared in (0, 250):
        names = [f"a{n}" if n < shared else f"b{n}" for n in range(300)]
        first, second, _ = match_rows(names, [f"a{n}" for n in range(300)])
        draws = draw_differences(([mean(values)], [mean(values)]), (first, second), 400, 0)
        widths.append(float(draws.std()))
    assert widths[1] < 0.6 * widths[0]


def test_a_draw_without_rows_of_one_sample_is_undefined() -> None:
    def nothing(counts: Counts) -> Floats:
        return np.asarray(counts.sum(axis=1), np.float64)

    first, second, _ = match_rows(["a"], ["b"])
    draws = draw_differences(([nothing], [nothing]), (first, second), 50, 0)
    assert np.isnan(draws).any() and np.isfinite(draws).any()
