"""Homes that train each night: at most one in twenty ever promotes a model that is no better or flips too many rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.gate.homes import GUIDE, HOMES, TABLE, Home, p_values
from tests.training.calibration import draw_groups
from training.evaluation.group_tests import gain_by_groups, highest_share_by_groups

MOST_HOMES = 17
"""Of 200: 5 %, and two standard deviations."""
BROKEN = [name for name, home in TABLE.items() if home.control == "each" or not home.counts_groups]


def test_the_simulated_p_values_are_those_of_the_gate() -> None:
    random = np.random.default_rng(1)
    groups = draw_groups(random, 60, "geometric")
    draw = random.random(len(groups.numbers))
    gained, lost = draw < 0.1, draw > 0.99
    for most in (0.02, 0.05, 0.08):
        of_gain, of_flips = p_values(gained, lost, groups, most)
        assert of_gain == gain_by_groups(gained.astype(float) - lost, groups, 0.0, 0.95).p_value
        assert (of_flips <= 0.05) == (highest_share_by_groups(lost, groups, 0.95) <= most)


@pytest.mark.slow
@pytest.mark.parametrize("home", [GUIDE, Home(minimum_f1=0.8, max_flips=0.02, groups="new")], ids=["guide", "groups"])
def test_few_homes_ever_promote_a_model_that_is_no_better(home: Home) -> None:
    assert sum(map(home.promotes, range(20))) <= 4
    assert sum(map(replace(home, control="each", counts_groups=False).promotes, range(20))) >= 15


@pytest.mark.drill
@pytest.mark.parametrize("name", [name for name in TABLE if name not in BROKEN])
def test_one_home_of_twenty_ever_promotes_a_model_that_is_no_better(name: str) -> None:
    assert sum(map(TABLE[name].promotes, range(HOMES))) <= MOST_HOMES


@pytest.mark.drill
@pytest.mark.parametrize("name", BROKEN)
def test_homes_that_count_no_comparisons_or_no_groups_promote_far_more(name: str) -> None:
    assert sum(map(TABLE[name].promotes, range(HOMES))) > 3 * MOST_HOMES
