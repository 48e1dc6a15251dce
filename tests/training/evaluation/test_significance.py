"""Promotion needs significance: how often models that are as good, and better ones, pass, one night or each night of a
year."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import binom

from training.evaluation.predictions import Figure
from training.evaluation.significance import (
    Significance,
    alpha_spent,
    find_detectable_gain,
    find_needed_rows,
    highest_share,
    mcnemar,
    paired,
    promotion_chance,
    rows_for_share,
)

DRAWS, ROWS, CONFIDENCE = 200, 1000, 0.95
Right = npt.NDArray[np.bool_]


def mean(new: npt.ArrayLike, old: npt.ArrayLike) -> Figure:
    """The mean of a number of each row: the new model's N, the old one's N."""
    values = np.concatenate([new, old]).astype(np.float64)
    return lambda counts: counts @ values / counts.sum(axis=1)


def by_mcnemar(new: Right, old: Right) -> Significance:
    return mcnemar(int((new & ~old).sum()), int((old & ~new).sum()), len(new), CONFIDENCE)


def by_permutation(new: Right, old: Right) -> Significance:
    return paired(mean(new, old), len(new), margin=0.0, confidence=CONFIDENCE)


def promoted(test: Callable[[Right, Right], Significance], rows: int, gained: float, lost: float) -> int:
    """Of DRAWS test sets, those on which a model passes that alone is right on such a share of all rows there are."""
    random, passed = np.random.default_rng(6), 0
    for _ in range(DRAWS):
        # Which of the two is right: both, the new one alone, the old one alone, neither.
        tasks = random.choice(4, size=rows, p=[0.8, gained, lost, 0.2 - gained - lost])
        passed += test(tasks <= 1, (tasks == 0) | (tasks == 2)).better
    return passed


@pytest.mark.parametrize("test", [by_mcnemar, by_permutation])
def test_few_models_that_are_only_as_good_are_promoted_by_chance(test: Callable[[Right, Right], Significance]) -> None:
    assert 1 <= promoted(test, rows=300, gained=0.05, lost=0.05) <= 18


@pytest.mark.slow
@pytest.mark.parametrize("test", [by_mcnemar, by_permutation])
def test_most_models_that_are_three_points_better_are_promoted(test: Callable[[Right, Right], Significance]) -> None:
    assert promoted(test, ROWS, gained=0.065, lost=0.035) >= 0.8 * DRAWS


def test_mcnemar_is_the_exact_test_of_a_fair_coin() -> None:
    found = mcnemar(8, 2, rows=100, confidence=0.9)
    assert found.gain == pytest.approx(0.06)
    assert found.p_value == pytest.approx((45 + 10 + 1) / 1024)  # 8, 9 or 10 heads of 10
    assert found.better and found.at_least > 0
    assert not mcnemar(8, 2, rows=100, confidence=0.95).better
    # At the confidence that the p-value leaves, the interval ends at no gain.
    assert mcnemar(8, 2, rows=100, confidence=1 - 56 / 1024).at_least == pytest.approx(0, abs=1e-9)


def test_models_that_predict_the_same_are_not_better_and_not_worse_than_a_margin_allows() -> None:
    right = np.arange(ROWS) % 5 > 0
    assert mcnemar(0, 0, ROWS, CONFIDENCE) == Significance(0.0, 0.0, 1.0, False)
    assert by_permutation(right, right) == Significance(0.0, 0.0, 1.0, False, least_p_value=1 / 1001)
    assert paired(mean(right, right), ROWS, margin=-0.01, confidence=CONFIDENCE).better


def test_no_failure_in_few_rows_is_no_proof_of_none() -> None:
    """The rule of three: 0 of N rows lost leaves a rate of 3 / N at 95 % confidence."""
    for rows, better in ((100, False), (1000, True)):
        new, old = ([*np.ones(rows), guard] for guard in (0.0, 1.0))
        found = paired(mean(new, old), rows, 1, margin=-0.01, confidence=CONFIDENCE)
        assert found.better == better and found.at_least == pytest.approx(-3 / rows, rel=0.02)


def test_the_worst_of_the_worst_cases_counts() -> None:
    new, old = ([*np.arange(100), *guards] for guards in ((50, 0, 10), (50, 900, 10)))
    found = paired(mean(new, old), 100, 3, margin=-100, confidence=CONFIDENCE)
    assert found.gain == 0 and found.at_least == pytest.approx(-27, abs=0.5)  # 900 thrice in 101 rows


def test_the_permutation_test_is_exact_on_few_rows() -> None:
    found = paired(mean([1.0, 2, 3, 4], [0.0, 0, 0, 0]), 4, margin=0.0, confidence=CONFIDENCE)
    assert found.p_value == pytest.approx(1 / 16, rel=0.2) and not found.better
    assert found.at_least == 0  # the interval has what is not ruled out
    found = paired(mean([1.0, 2, 3, 4, 5, 6], [0.0] * 6), 6, margin=0.0, confidence=CONFIDENCE)
    assert found.p_value == pytest.approx(1 / 64, rel=0.5) and found.better and found.at_least > 2


def test_of_figures_of_which_less_is_better_the_gain_is_how_much_less() -> None:
    wrong_less, wrong_more = np.arange(ROWS) % 10 == 0, np.arange(ROWS) % 5 == 0
    figure = mean(wrong_less, wrong_more)
    found = paired(figure, ROWS, margin=0.05, confidence=CONFIDENCE, less_is_better=True)
    assert found.gain == pytest.approx(0.1) and 0.05 < found.at_least < 0.1 and found.better
    assert not paired(figure, ROWS, margin=0.0, confidence=CONFIDENCE).better


@pytest.mark.slow
def test_very_high_confidence_continues_the_draws_as_a_normal_distribution() -> None:
    rows = 200  # each of which counts in a million draws
    gains = np.random.default_rng(2).normal(0.6, 1, rows)
    found = paired(mean(gains, np.zeros(rows)), rows, margin=0.0, confidence=1 - 1e-6)
    error = gains.std() / np.sqrt(rows)
    assert found.better and found.at_least == pytest.approx(gains.mean() - 4.75 * error, rel=0.1)
    assert found.p_value <= 1e-6
    less = gains - gains.mean() + 4.5 * error
    assert not paired(mean(less, np.zeros(rows)), rows, margin=0.0, confidence=1 - 1e-6).better


def test_a_model_that_the_permutation_test_rejects_takes_few_draws_at_any_confidence() -> None:
    random, drawn = np.random.default_rng(3), 0
    figure = mean(*random.normal(0, 1, (2, ROWS)))

    def counted(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        nonlocal drawn
        drawn += len(counts)
        return figure(counts)

    found = paired(counted, ROWS, margin=0.0, confidence=1 - 1e-6)
    assert not found.better and found.p_value > 0.01 and drawn < 15_000


def test_a_slow_figure_takes_fewer_permutations_and_the_least_p_value_follows_their_number() -> None:
    figure = mean(*np.random.default_rng(3).normal(0, 1, (2, ROWS)))
    least = [paired(figure, ROWS, margin=0.0, confidence=1 - 1e-9, cost=cost).least_p_value for cost in (1, 100, 10**6)]
    assert least == [1 / 1_000_001, 1 / 100_001, 1 / 20_001]


def test_draws_without_any_spread_leave_a_chance() -> None:
    found = paired(mean(np.ones(ROWS), np.zeros(ROWS)), ROWS, margin=-0.5, confidence=0.999)
    assert found.better and found.p_value == 1 / 20_001


def test_a_figure_that_few_draws_have_is_no_evidence() -> None:
    """A figure that needs the first row, which 63 % of the draws have, or two certain rows, which 40 % have."""

    def needing(rows: int) -> Figure:
        def figure(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
            new, old = counts[:, :ROWS], counts[:, ROWS:]
            there = (new + old)[:, :rows].all(axis=1)
            return np.where(there, new.any(axis=1), np.nan)

        return figure

    first, two = (paired(needing(rows), ROWS, margin=-0.5, confidence=CONFIDENCE) for rows in (1, 2))
    assert first.better and not two.better and two.p_value == 1 and np.isnan(two.at_least)


def test_a_figure_that_is_no_number_is_no_evidence_and_draws_without_one_are_left_out() -> None:
    def undefined(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        return np.full(len(counts), np.nan)

    def undefined_without_the_first(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        new, old = counts[:, 0] > 0, counts[:, ROWS:].any(axis=1)
        return np.where(new, 1.0, np.where(old, 0.0, np.nan))

    found = paired(undefined, ROWS, margin=0.0, confidence=CONFIDENCE)
    assert not found.better and np.isnan(found.p_value)
    found = paired(undefined_without_the_first, ROWS, margin=-0.5, confidence=CONFIDENCE)
    assert found.better and found.at_least == 1.0


# Power


@pytest.mark.slow
@pytest.mark.parametrize("max_flips", [None, 0.06])
@pytest.mark.parametrize(("rows", "gained", "lost"), [(300, 0.09, 0.03), (1000, 0.065, 0.035), (40, 0.3, 0.0)])
def test_the_chance_of_a_promotion_is_that_of_drawn_rows(
    rows: int, gained: float, lost: float, max_flips: float | None
) -> None:
    random, found = np.random.default_rng(7), 0
    draws = random.multinomial(rows, [gained, lost, 1 - gained - lost], size=2000)
    passed = {
        (new, old): mcnemar(new, old, rows, CONFIDENCE).better
        and (max_flips is None or highest_share(old, rows, CONFIDENCE) <= max_flips)
        for new, old in {(int(new), int(old)) for new, old, _ in draws}
    }
    found = sum(passed[int(new), int(old)] for new, old, _ in draws)
    chance = promotion_chance(rows, gained - lost, gained + lost, CONFIDENCE, max_flips)
    assert found / 2000 == pytest.approx(chance, abs=0.03)


def test_the_gain_that_is_found_and_the_rows_that_it_takes_are_two_sides_of_one_chance() -> None:
    for differing, max_flips in ((0.1, None), (0.1, 0.06), (0.02, 0.01)):
        gain = find_detectable_gain(2000, differing, CONFIDENCE, max_flips)
        assert gain and promotion_chance(2000, gain, differing, CONFIDENCE, max_flips) == pytest.approx(0.8, abs=0.01)
        rows = find_needed_rows(gain, differing, CONFIDENCE, max_flips)
        assert rows and rows == pytest.approx(2000, rel=0.1)
    assert find_detectable_gain(4, 0.1, CONFIDENCE) is None  # 4 rows of 4 by chance: once in 16
    assert find_detectable_gain(298, 0.1, CONFIDENCE, 0.01) is None and rows_for_share(0.01, CONFIDENCE) == 299
    assert find_needed_rows(1e-5, 0.5, CONFIDENCE) is None
    assert promotion_chance(1000, 0.0, 0.1, CONFIDENCE) <= 0.05
    assert promotion_chance(1000, 0.0, 0.0, CONFIDENCE) == 0


# Many comparisons on the same rows

ALPHA, COMPARED_ROWS, NIGHTS, HOMES = 0.05, 300, 365, 200
NIGHT = range(NIGHTS)
MOST_HOMES = 17
"""Of 200 homes: 5 %, and two standard deviations."""


def test_the_levels_of_all_comparisons_add_up_to_that_of_one() -> None:
    levels = [alpha_spent(number, ALPHA) for number in range(1, 200_001)]
    assert levels == sorted(levels, reverse=True)
    rest = ALPHA * 200_000**-0.6 / 0.6 / 2.2857656755644  # the integral of all later ones
    assert sum(levels) + rest == pytest.approx(ALPHA, rel=1e-6)


Window = Callable[[int], tuple[int, int]]
"""The first judged row of a night, and the first one after the last."""


def nightly_p_values(judged: Window) -> npt.NDArray[np.float64]:
    """(HOMES, NIGHTS) the p-value of each night's challenger, which is as good as the champion."""
    random, found, rows = np.random.default_rng(19), np.ones((HOMES, NIGHTS)), judged(NIGHTS - 1)[1]
    for p_values in found:
        right = random.beta(6, 1, rows).astype(np.float32)  # how often models get a row right
        champion = random.random(rows, np.float32) < right
        for night in range(NIGHTS):
            window = slice(*judged(night))
            own, other = random.random(right[window].shape, np.float32) < right[window], champion[window]
            gained, lost = int((own & ~other).sum()), int((other & ~own).sum())
            if gained > lost:
                p_values[night] = 1 - binom.cdf(gained - 1, gained + lost, 0.5)
    return found


def test_the_p_value_of_the_simulated_nights_is_that_of_the_gate() -> None:
    assert 1 - binom.cdf(29, 40, 0.5) == pytest.approx(mcnemar(30, 10, COMPARED_ROWS, CONFIDENCE).p_value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "judged",
    [
        pytest.param(lambda night: (0, COMPARED_ROWS), id="the same rows"),
        pytest.param(lambda night: (0, COMPARED_ROWS + 10 * night), id="growing rows"),
        pytest.param(lambda night: (10 * night, COMPARED_ROWS + 10 * night), id="a moving window"),
    ],
)
def test_one_home_of_twenty_ever_promotes_a_model_that_is_no_better_in_365_nights(judged: Window) -> None:
    """The count goes on in all of them: tests/tasks/registry/test_comparisons.py."""
    p_values = nightly_p_values(judged)

    def homes(levels: npt.ArrayLike) -> int:
        return int((p_values <= levels).any(axis=1).sum())

    assert homes([alpha_spent(night, ALPHA) for night in range(1, NIGHTS + 1)]) <= MOST_HOMES
    # Not if the count begins anew each night, as it would if only splits without a new row were the same rows.
    assert homes(alpha_spent(1, ALPHA)) > HOMES / 4
    assert homes(ALPHA) > HOMES / 2


@pytest.mark.slow
def test_one_home_of_twenty_ever_promotes_a_model_that_is_no_better_or_flips_too_many_rows_in_365_nights() -> None:
    """On rows that grow, models that gain much and lose a little more than 1 % of the rows take turns with models that
    lose as few rows as they gain. A model has to pass both tests."""
    random, most, rows = np.random.default_rng(20), 0.01, [1000 + 10 * night for night in NIGHT]
    p_values, each = np.ones((2, HOMES, NIGHTS))
    for home in range(HOMES):
        hard = random.beta(0.5, 4.5, rows[-1]).astype(np.float32)  # 0.1 on average: how often models differ in a row
        for night, count in enumerate(rows):
            lost_rate, gained_rate = (0.101, 0.5) if night % 2 else (0.04, 0.04)
            draw = random.random(count, np.float32)
            lost = int((draw < lost_rate * hard[:count]).sum())
            gained = int((draw > 1 - gained_rate * hard[:count]).sum())
            of_gain = 1 - binom.cdf(gained - 1, gained + lost, 0.5) if gained > lost else 1.0
            of_flips = binom.cdf(lost, count, most)
            p_values[home, night], each[home, night] = max(of_gain, of_flips), min(of_gain, of_flips)
    levels = [alpha_spent(1 + night, ALPHA) for night in NIGHT]
    found = [highest_share(5, count, 1 - level) <= most for count, level in zip(rows, levels, strict=True)]
    assert found == [binom.cdf(5, count, most) <= level for count, level in zip(rows, levels, strict=True)]
    assert (p_values <= levels).any(axis=1).sum() <= MOST_HOMES
    assert (p_values <= ALPHA).any(axis=1).sum() > HOMES / 4 and (each <= levels).any(axis=1).all()
