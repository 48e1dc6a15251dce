"""A gate at 95 % confidence promotes at most one in twenty models that are no better, whatever the rows are like."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.training.calibration import REGIMES, GroupRegime, Regime, draw_once, three_rows_differ
from training.evaluation.predictions import OneLabel

TRIALS = 1_000
MOST = 65
"""False promotions among 1,000 trials: 50, and two standard deviations."""
QUICK = (
    "alike-accuracy-20",
    "disaster-log_loss-200",
    "worse by the margin-accuracy-200",
    "too many flips-accuracy-1000",
    "few flips-accuracy-1000",
    "groups, correlation 0.5-accuracy-100 of 10",
    "groups, correlation 1-accuracy-100 of geometric",
    "lost groups-accuracy-100 of 10",
)


@pytest.fixture(autouse=True)
def _made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_once(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_one_of_twenty_equal_models_is_promoted_at_most(name: str) -> None:
    assert REGIMES[name].false_promotions(TRIALS) <= MOST


def test_the_permutation_test_keeps_the_confidence_without_a_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bootstrap of three differing rows alone promotes one of eight equal models."""
    monkeypatch.setattr(OneLabel, "worst_cases", lambda new, old: (new.take([]), old.take([])))
    assert Regime("log_loss", 20, three_rows_differ).false_promotions(TRIALS // 2) <= MOST // 2


def test_less_confidence_promotes_more_than_that() -> None:
    """So the bound above notices a confidence that is not kept."""
    assert REGIMES["worse by the margin-accuracy-200"].false_promotions(TRIALS, confidence=0.9) > MOST


@pytest.mark.slow
def test_a_test_that_ignores_groups_promotes_far_more() -> None:
    regime = REGIMES["groups, correlation 1-accuracy-100 of 10"]
    assert isinstance(regime, GroupRegime)
    assert replace(regime, ignored=True).false_promotions(TRIALS) > 3 * MOST


@pytest.mark.drill
@pytest.mark.parametrize("name", [name for name in REGIMES if name not in QUICK])
def test_one_of_twenty_equal_models_is_promoted_at_most_in_every_regime(name: str) -> None:
    assert REGIMES[name].false_promotions(TRIALS) <= MOST
