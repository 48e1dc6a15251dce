"""The gain of settings over a recipe, with seeds and rows as random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from training.evaluation.seed_gains import SeedGain

DRAWS, TRIALS = 200, 200


def trial(random: np.random.Generator, seeds: int, groups: int, by_seed: float, by_row: float) -> SeedGain:
    """Two settings of the same accuracy, in groups of two rows that are alike. A seed changes the accuracy of all rows,
    and settings that of each row."""
    shared, of_setting = random.standard_normal(groups), by_row * random.standard_normal((2, 1, groups))
    of_seed, noise = by_seed * random.standard_normal((2, seeds, 1)), random.standard_normal((2, seeds, groups))
    right = 1 + 2 * shared + of_setting + of_seed + noise > 0
    gains = right[1].astype(float) - right[0]
    counts = random.multinomial(groups, np.full(groups, 1 / groups), size=DRAWS)
    return SeedGain.of(gains.mean(axis=1), gains @ counts.T / groups, groups)


@pytest.mark.slow
@pytest.mark.parametrize(("by_seed", "by_row"), [(0.0, 0.0), (0.4, 0.0), (0.0, 1.0), (0.4, 0.5)])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_has_the_true_gain_in_19_of_20_cases(seeds: int, by_seed: float, by_row: float) -> None:
    """At least 90 % of 200 trials: 95 %, and three standard deviations."""
    random = np.random.default_rng(seeds)
    found = [trial(random, seeds, 200, by_seed, by_row).interval for _ in range(TRIALS)]
    assert sum(low <= 0 <= high for low, high in found) >= 0.9 * TRIALS


def test_an_interval_over_rows_alone_would_take_the_luck_of_seeds_for_a_gain() -> None:
    random, misled = np.random.default_rng(1), 0
    for _ in range(TRIALS):
        found = trial(random, 3, 400, 0.4, 0.0)
        misled += abs(found.gain) > 1.96 * found.of_rows**0.5
    assert misled > TRIALS / 3


def test_more_seeds_tell_a_gain_only_if_the_rows_do() -> None:
    known: dict[str, Any] = {"gain": 0.01, "seeds": 4, "rows": 10_000}
    found = SeedGain(of_seeds=0.01**2, of_rows=0.002**2, of_both=0.0, **known)
    assert found.interval[0] < 0 and found.needed_seeds and 10 < found.needed_seeds < 30
    variance, known["seeds"] = 0.01**2 * 4 / found.needed_seeds, found.needed_seeds
    more = SeedGain(of_seeds=variance, of_rows=0.002**2, of_both=0.0, **known)
    assert more.interval[0] > 0
    assert SeedGain(of_seeds=0.01**2, of_rows=0.006**2, of_both=0.0, **known).needed_seeds is None
    same = SeedGain.of(np.zeros(3), np.zeros((3, DRAWS)), 100)
    assert same.interval == (0.0, 0.0) and same.needed_seeds is None
