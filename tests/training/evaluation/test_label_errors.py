"""The interval of the share of wrong labels in a list covers the truth, whatever the model and the errors are like."""

from __future__ import annotations

import numpy as np
import pytest

from tests.labels.regimes import PROMISED, REGIMES, simulate
from training.evaluation.label_errors import confident_labels, find_outliers, find_suspects

HOMES, MOST = 200, 16
"""Homes whose interval does not cover the truth: 10 of 200, and two standard deviations."""
QUICK_HOMES, QUICK_MOST = 20, 3
QUICK = ("5 % of any other label", "rare labels", "naive Bayes, no error")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_interval_covers_the_truth_in_19_of_20_homes(name: str) -> None:
    found = simulate(REGIMES[name], QUICK_HOMES)
    assert found.homes - found.covered <= QUICK_MOST


@pytest.mark.drill
@pytest.mark.parametrize("name", PROMISED)
def test_the_interval_covers_the_truth_in_19_of_20_homes_of_every_promised_regime(name: str) -> None:
    found = simulate(REGIMES[name], HOMES)
    assert found.homes - found.covered <= MOST


def test_the_interval_says_something() -> None:
    """An interval from 0 to 1 would cover everything."""
    errors, none = (simulate(REGIMES[name], 4) for name in ("classes far apart", "no error"))
    assert errors.low > 0.7 and none.high < 0.3


def test_a_label_is_confident_from_its_usual_probability_on() -> None:
    """Confident learning by hand: usual probabilities (0.8 + 0.6) / 2 and (0.5 + 0.9) / 2."""
    probabilities = np.array([[0.8, 0.2], [0.6, 0.4], [0.5, 0.5], [0.1, 0.9], [0.25, 0.75]])
    assert confident_labels(np.array([0, 0, 1, 1, 0]), probabilities).tolist() == [0, 0, -1, 1, 1]


def test_a_split_without_rows_and_a_model_that_agrees_have_no_suspects() -> None:
    agreed = find_suspects(np.array([0, 1] * 20), np.array([[0.9, 0.1], [0.1, 0.9]] * 20))
    assert len(agreed.entries) == 0 and agreed.share(agreed.entries) is None and agreed.noise == 0
    empty = find_suspects(np.zeros(0, np.int64), np.zeros((0, 3)))
    assert len(empty.entries) == 0


def test_outliers_are_the_numbers_that_are_further_off_than_the_others() -> None:
    predictions = np.linspace(0, 1, 100)
    numbers = predictions + np.tile([-0.1, 0.1], 50)
    numbers[[7, 30]] += [5, 9]
    assert find_outliers(numbers, predictions).tolist() == [30, 7]
    assert find_outliers(predictions, predictions).tolist() == []
