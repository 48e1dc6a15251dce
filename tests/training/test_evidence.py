"""Promotion needs evidence: how often models that are as good, and better ones, pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from training.evidence import Evidence, bootstrap, mcnemar
from training.resampling import Figure

DRAWS, ROWS, CONFIDENCE = 200, 1000, 0.95
Right = npt.NDArray[np.bool_]


def share(right: Right) -> Figure:
    return lambda counts: counts.astype(np.float64) @ right / len(right)


def by_mcnemar(new: Right, old: Right) -> Evidence:
    return mcnemar(int((new & ~old).sum()), int((old & ~new).sum()), len(new), CONFIDENCE)


def by_bootstrap(new: Right, old: Right) -> Evidence:
    return bootstrap(share(new), share(old), len(new), margin=0.0, confidence=CONFIDENCE)


def promoted(test: Callable[[Right, Right], Evidence], rows: int, gained: float, lost: float) -> int:
    """Of DRAWS test sets, those on which a model passes that alone is right on such a share of all rows there are."""
    random, passed = np.random.default_rng(6), 0
    for _ in range(DRAWS):
        # Which of the two is right: both, the new one alone, the old one alone, neither.
        kinds = random.choice(4, size=rows, p=[0.8, gained, lost, 0.2 - gained - lost])
        passed += test(kinds <= 1, (kinds == 0) | (kinds == 2)).better
    return passed


@pytest.mark.parametrize("test", [by_mcnemar, by_bootstrap])
def test_few_models_that_are_only_as_good_are_promoted_by_chance(test: Callable[[Right, Right], Evidence]) -> None:
    assert 1 <= promoted(test, rows=300, gained=0.05, lost=0.05) <= 18


@pytest.mark.parametrize("test", [by_mcnemar, by_bootstrap])
def test_most_models_that_are_three_points_better_are_promoted(test: Callable[[Right, Right], Evidence]) -> None:
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
    assert mcnemar(0, 0, ROWS, CONFIDENCE) == by_bootstrap(right, right) == Evidence(0.0, 0.0, 1.0, False)
    assert bootstrap(share(right), share(right), ROWS, margin=-0.01, confidence=CONFIDENCE).better


def test_of_figures_of_which_less_is_better_the_gain_is_how_much_less() -> None:
    wrong_less, wrong_more = np.arange(ROWS) % 10 == 0, np.arange(ROWS) % 5 == 0
    found = bootstrap(
        share(wrong_less), share(wrong_more), ROWS, margin=0.05, confidence=CONFIDENCE, less_is_better=True
    )
    assert found.gain == pytest.approx(0.1) and 0.05 < found.at_least < 0.1 and found.better
    assert not bootstrap(share(wrong_less), share(wrong_more), ROWS, margin=0.0, confidence=CONFIDENCE).better


def test_a_figure_that_is_no_number_is_no_evidence_and_draws_without_one_are_passed_over() -> None:
    def undefined(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        return np.full(len(counts), np.nan)

    def undefined_without_the_first(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        return np.where(counts[:, 0] > 0, 1.0, np.nan)

    nothing = share(np.zeros(ROWS, dtype=bool))
    found = bootstrap(undefined, nothing, ROWS, margin=0.0, confidence=CONFIDENCE)
    assert not found.better and np.isnan(found.p_value)
    found = bootstrap(undefined_without_the_first, nothing, ROWS, margin=0.5, confidence=CONFIDENCE)
    assert found.better and found.at_least == 1.0
