"""Effect sizes have intervals that hold, and a difference counts only above its threshold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import fisher_exact, ks_2samp, mannwhitneyu

from training.evaluation.drift.effects import (
    Effect,
    compare_categories,
    compare_flags,
    compare_numbers,
    compare_scores,
)

TRIALS = 400
Draw = Callable[[np.random.Generator], Effect]


def numbers(shift: float) -> Draw:
    """Uniform numbers, of which those of the new rows are higher: the distance is the shift."""
    return lambda random: compare_numbers(random.random(300), random.random(200) + shift, 0.1)


def categories(shift: float) -> Draw:
    """Two categories, whose shares differ by the shift."""
    return lambda random: compare_categories(
        (random.random(300) < 0.5 - shift / 2).tolist(), (random.random(200) < 0.5 + shift / 2).tolist(), 0.1
    )


def scores(shift: float) -> Draw:
    """Normal scores; a shift of 0.358 is an AUC of 0.6."""
    return lambda random: compare_scores(random.standard_normal(300), random.standard_normal(200) + shift, 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [numbers(0), categories(0), scores(0)], ids=["numbers", "categories", "scores"])
def test_without_a_difference_one_of_twenty_is_significant_at_most(draw: Draw) -> None:
    found = [draw(np.random.default_rng([1, trial])) for trial in range(TRIALS)]
    assert sum(effect.p_value <= 0.05 for effect in found) <= 32  # 20, and three standard deviations
    assert all(effect.p_threshold >= effect.p_value for effect in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw", [numbers(0.1), categories(0.1), scores(0.358)], ids=["numbers", "categories", "scores"]
)
def test_a_difference_at_its_threshold_is_above_it_in_one_of_twenty_at_most(draw: Draw) -> None:
    found = [draw(np.random.default_rng([2, trial])) for trial in range(TRIALS)]
    assert sum(effect.p_threshold <= 0.05 for effect in found) <= 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "true"),
    [(numbers(0.3), 0.3), (categories(0.3), 0.3), (scores(0.954), 0.75)],
    ids=["numbers", "categories", "scores"],
)
def test_the_interval_has_the_true_effect_in_19_of_20_cases(draw: Draw, true: float) -> None:
    found = [draw(np.random.default_rng([3, trial])) for trial in range(TRIALS)]
    assert sum(effect.low <= true <= effect.high for effect in found) >= 0.93 * TRIALS
    assert true - 0.03 < np.median([effect.value for effect in found]) < true + 0.06


def test_a_tiny_difference_in_many_rows_is_significant_and_still_below_its_threshold() -> None:
    random = np.random.default_rng(4)
    effect = compare_numbers(random.random(200_000), random.random(200_000) + 0.01, 0.1)
    assert effect.p_value < 1e-6 and effect.p_threshold > 0.99 and effect.high < 0.1


def test_distance_and_auc_are_those_of_scipy_with_ties() -> None:
    random = np.random.default_rng(5)
    first, second = random.integers(0, 8, 90).astype(float), random.integers(1, 9, 70).astype(float)
    assert compare_numbers(first, second, 0.1).value == pytest.approx(ks_2samp(first, second).statistic)
    test = mannwhitneyu(second, first, alternative="greater", use_continuity=False, method="asymptotic")
    found = compare_scores(first, second, 0.6)
    assert found.value == pytest.approx(test.statistic / (90 * 70))
    assert found.p_value == pytest.approx(test.pvalue, rel=1e-6)


def test_rare_flags_are_no_more_significant_than_the_exact_test() -> None:
    first, second = np.arange(1000) < 0, np.arange(1000) < 4
    assert compare_flags(first, second, 0.1).p_value >= fisher_exact([[0, 1000], [4, 996]]).pvalue


def test_categories_of_few_rows_are_pooled_before_they_count() -> None:
    """A hundred names of one row each differ by chance alone."""
    common = ["a"] * 200 + ["b"] * 200
    effect = compare_categories([*common, *(f"x{n}" for n in range(50))], [*common, *(f"y{n}" for n in range(50))], 0.1)
    assert effect.value == 0 and effect.p_value > 0.5


@pytest.mark.parametrize("same", [[1.0] * 50, []])
def test_one_category_alone_is_no_difference(same: list[float]) -> None:
    assert compare_categories([*same, 1.0], [1.0, *same], 0.1).p_value == 1


def test_perfectly_separated_scores_are_above_any_threshold() -> None:
    found = compare_scores(np.arange(50.0), np.arange(50.0) + 100, 0.65)
    assert found.value == 1 and found.low > 0.9 and found.p_threshold < 1e-6
