"""Tests and bounds of rows in groups: those of rows if each group has one, and simulated groups else."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import expon

from tests.training.calibration import draw_groups
from training.evaluation import group_tests
from training.evaluation.bootstrap import draw_figures, draws
from training.evaluation.group_tests import (
    Clusters,
    chance_of_positive,
    gain_by_groups,
    groups_for_gain,
    groups_for_share,
    highest_share_by_groups,
)
from training.evaluation.row_groups import Groups
from training.evaluation.significance import find_detectable_gain, highest_share, mcnemar, paired, rows_for_share

CONFIDENCE = 0.95


def gains_of(rows: int, gained: int, lost: int) -> np.ndarray:
    return np.concatenate([np.ones(gained), -np.ones(lost), np.zeros(rows - gained - lost)])


@pytest.mark.parametrize(("rows", "gained", "lost"), [(20, 5, 0), (40, 8, 2), (300, 30, 10), (3000, 60, 5), (50, 3, 5)])
def test_of_groups_of_one_row_the_tests_are_those_of_rows(rows: int, gained: int, lost: int) -> None:
    groups, gains = Groups(np.arange(rows)), gains_of(rows, gained, lost)
    found, exact = gain_by_groups(gains, groups, 0.0, CONFIDENCE), mcnemar(gained, lost, rows, CONFIDENCE)
    assert found.p_value == pytest.approx(exact.p_value, rel=1e-9) and found.better == exact.better
    assert (found.gain, found.at_least > 0) == (exact.gain, exact.at_least > 0)
    for confidence in (0.95, 1 - 1e-6):
        share = highest_share_by_groups(gains < 0, groups, confidence)
        assert share == pytest.approx(highest_share(lost, rows, confidence), abs=1e-8)


def test_of_groups_whose_rows_are_all_alike_each_counts_as_one_row() -> None:
    groups = Groups(np.repeat(np.arange(40), 10))
    found = gain_by_groups(np.repeat(gains_of(40, 8, 2), 10), groups, 0.0, CONFIDENCE)
    assert found.p_value == pytest.approx(mcnemar(8, 2, 40, CONFIDENCE).p_value, rel=1e-9)
    assert groups.design_effect(np.repeat(gains_of(40, 8, 2), 10)) == pytest.approx(10)


def test_the_chance_of_a_positive_sum_is_that_of_drawn_weights_and_exact_in_the_tail() -> None:
    factors = np.array([-3.0, -3, -1, 0.5, 2, 2, 4])
    weights = expon.rvs(size=(200_000, len(factors)), random_state=1)
    assert chance_of_positive(factors) == pytest.approx(np.mean(weights @ factors > 0), abs=0.004)
    assert chance_of_positive([-1.0] * 40 + [1.0]) == pytest.approx(2.0**-40, rel=1e-9)
    assert (chance_of_positive([-1.0]), chance_of_positive([1.0, 0.0])) == (0.0, 1.0)
    assert chance_of_positive([1.0, -1.0]) == pytest.approx(0.5)
    assert chance_of_positive([1.0, 1.0, -1.0]) == pytest.approx(0.75)


def test_the_groups_that_a_gain_or_a_bound_of_flips_takes_are_the_fewest_with_which_it_is_found() -> None:
    groups = draw_groups(np.random.default_rng(2), 400, "geometric")

    def some(number: int) -> Groups:
        """So many groups with the mean odds of all."""
        return Groups(np.repeat(np.arange(number), 10))

    equal = some(7)
    least, clean = groups_for_gain(equal, CONFIDENCE), groups_for_share(equal, 0.01, CONFIDENCE)
    assert (least, clean) == (5, rows_for_share(0.01, CONFIDENCE))  # as of rows
    for number, enough in ((least, True), (least - 1, False)):
        assert gain_by_groups(np.ones(10 * number), some(number), 0.0, CONFIDENCE).better == enough
    for number, enough in ((clean, True), (clean - 1, False)):
        found = highest_share_by_groups(np.zeros(10 * number), some(number), CONFIDENCE)
        assert (found <= 0.01) == enough
    # Groups of other sizes need more.
    assert groups_for_gain(groups, CONFIDENCE) > least and groups_for_share(groups, 0.01, CONFIDENCE) > 1.5 * clean
    needs = groups_for_share(groups, 0.012, CONFIDENCE)
    share = highest_share_by_groups(np.zeros(len(groups.numbers)), groups, CONFIDENCE)
    assert (share <= 0.012) == (needs <= 400)


def test_a_margin_counts_by_rows_also_below_zero() -> None:
    groups = Groups(np.repeat(np.arange(100), 10))
    assert gain_by_groups(np.zeros(1000), groups, -0.05, CONFIDENCE).better
    assert not gain_by_groups(np.zeros(1000), groups, -0.01, CONFIDENCE).better  # 3 groups of 100 may lose all rows
    gains = np.where(np.arange(1000) % 10 == 0, 1.0, 0.0)
    assert gain_by_groups(gains, groups, 0.05, CONFIDENCE).better
    found = gain_by_groups(gains, groups, 0.09, CONFIDENCE)
    assert not found.better and found.at_least < 0.09 and found.gain == pytest.approx(0.1)


def test_a_draw_takes_whole_groups_and_intervals_are_as_wide_as_those_of_so_many_groups() -> None:
    numbers = np.array([0, 0, 1, 2, 2, 2])
    for counts in draws(6, 50, 0, numbers):
        assert (counts[:, 0] == counts[:, 1]).all() and (counts[:, 3:] == counts[:, [3]]).all()
        assert (counts[:, [0, 2, 3]].sum(axis=1) == 3).all()
    values = np.repeat(np.random.default_rng(1).random(60), 10)
    figures = [lambda counts: counts @ values / counts.sum(axis=1)]
    grouped, alone = (
        float(draw_figures(figures, 600, 1000, 0, groups=groups).std()) for groups in (np.arange(600) // 10, None)
    )
    assert grouped == pytest.approx(np.sqrt(10) * alone, rel=0.15)


def test_the_permutation_test_exchanges_whole_groups_and_a_worst_case_has_the_rows_of_a_group() -> None:
    values = np.repeat([1.0, 2, 3, 4], 25)

    def figure(counts: np.ndarray) -> np.ndarray:
        return counts[:, :100] @ values / 100

    groups = Groups(np.repeat(np.arange(4), 25))
    found = paired(figure, 100, margin=0.0, confidence=CONFIDENCE, groups=groups)
    assert found.p_value == pytest.approx(1 / 16, rel=0.2) and not found.better
    assert paired(figure, 100, margin=0.0, confidence=CONFIDENCE).better

    def guarded(counts: np.ndarray) -> np.ndarray:
        return (counts[:, :100].sum(axis=1) - counts[:, 100]) / 100

    lost = [paired(guarded, 100, 1, margin=-1, confidence=CONFIDENCE, groups=one) for one in (None, groups)]
    # The worst case is drawn thrice of 101 rows, or of 5 groups, once in 20 draws.
    assert lost[0].at_least == pytest.approx((98 - 3) / 100, abs=0.021)
    assert lost[1].at_least == pytest.approx((50 - 75) / 100, abs=0.01)


@pytest.mark.parametrize(("correlation", "sizes"), [(0.0, "10"), (0.5, "10"), (1.0, "10"), (0.5, "geometric")])
def test_the_power_of_groups_is_that_of_drawn_groups(
    correlation: float, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows differ by a number of their own, or by that of their group."""
    monkeypatch.setattr(group_tests, "BOUND_BISECTIONS", 0)  # of the end of the interval, which decides nothing
    random, found, trials = np.random.default_rng(3), 0, 200
    gained, lost, chances = 0.11, 0.03, np.zeros(trials)
    for trial in range(trials):
        groups = draw_groups(random, 100, sizes)
        own, of_group = random.random(len(groups.numbers)), random.random(100)[groups.numbers]
        draw = np.where(random.random(len(own)) < np.sqrt(correlation), of_group, own)
        gains = np.where(draw < lost, -1.0, np.where(draw > 1 - gained, 1.0, 0.0))
        found += gain_by_groups(gains, groups, 0.0, CONFIDENCE).better
        effect = 1 + (groups.usual_size - 1) * correlation
        clusters = Clusters(groups.usual_size, effect)
        chances[trial] = clusters.promotion_chance(len(own), gained - lost, gained + lost, CONFIDENCE)
    assert -0.06 < found / trials - chances.mean() < 0.12


def test_groups_find_larger_gains_only_and_a_bound_of_flips_larger_ones_still() -> None:
    alike, mixed = Clusters(10, 10), Clusters(10, 2)
    least = [
        find_detectable_gain(5000, 0.1, CONFIDENCE, limit, chance_of=one.promotion_chance)
        for one, limit in ((mixed, None), (alike, None), (alike, 0.04))
    ]
    assert None not in least and least == sorted(least, key=lambda gain: gain or 0)
    alone = find_detectable_gain(500, 0.1, CONFIDENCE)
    assert least[1] == pytest.approx(alone, rel=0.1)
