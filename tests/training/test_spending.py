"""Retraining each night promotes a model that is no better once in twenty years, not once in twenty nights."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from training.evaluation.alpha_spending import level_of
from training.evaluation.significance import mcnemar

ALPHA, ROWS, NIGHTS, HOMES = 0.05, 300, 365, 200
MOST = 17
"""Of 200 homes: 5 %, and two standard deviations."""


def test_the_levels_of_all_comparisons_add_up_to_that_of_one() -> None:
    levels = [level_of(number, ALPHA) for number in range(1, 200_001)]
    assert levels == sorted(levels, reverse=True)
    rest = ALPHA * 200_000**-0.6 / 0.6 / 2.2857656755644  # the integral of all later ones
    assert sum(levels) + rest == pytest.approx(ALPHA, rel=1e-6)


def ever_promoted(levels: np.ndarray) -> int:
    """In how many homes a challenger that is as good as the champion is promoted within a year of nights, all judged on
    the same rows."""
    p_value = lru_cache(maxsize=None)(lambda gained, lost: mcnemar(gained, lost, ROWS, 1 - ALPHA).p_value)
    random, homes = np.random.default_rng(19), 0
    for _ in range(HOMES):
        right = random.beta(6, 1, ROWS)  # how often models get a row right
        champion = random.random(ROWS) < right
        challengers = random.random((NIGHTS, ROWS)) < right
        gained, lost = (challengers & ~champion).sum(axis=1), (~challengers & champion).sum(axis=1)
        found = [p_value(*pair) for pair in zip(gained.tolist(), lost.tolist(), strict=True)]
        homes += bool((np.array(found) <= levels).any())
    return homes


def test_one_home_of_twenty_ever_promotes_a_model_that_is_no_better_in_365_nights() -> None:
    assert ever_promoted(np.array([level_of(night, ALPHA) for night in range(1, NIGHTS + 1)])) <= MOST
    assert ever_promoted(np.full(NIGHTS, ALPHA)) > HOMES / 2
