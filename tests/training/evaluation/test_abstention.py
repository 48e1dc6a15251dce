"""Among answered rows a model errs at most as often as asked for, with the confidence, whatever the rows are like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.abstention.regimes import CONFIDENCE, MAX_ERROR, REGIMES, review
from training.evaluation.abstention import (
    Judged,
    fewest_rows,
    find_thresholds,
    least_probability,
    risk_coverage,
)
from training.evaluation.row_groups import Groups

HOMES, MOST = 1_000, 65
"""Homes whose answered rows err too often: 50 of 1,000, and two standard deviations."""
QUICK_HOMES, QUICK_MOST = 60, 6
QUICK = ("same error at every probability", "ties", "any number of labels a row", "groups of ten")
IGNORED = "groups of ten, taken to be independent"


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_bound_holds_in_19_of_20_homes(name: str) -> None:
    found = REGIMES[name].homes(QUICK_HOMES)
    assert found.homes - found.held <= QUICK_MOST


def test_a_threshold_by_the_errors_of_validation_alone_is_wrong_in_every_second_home() -> None:
    found = REGIMES["same error at every probability"].homes(QUICK_HOMES)
    assert found.naive_held < QUICK_HOMES / 2


def test_the_bound_fails_if_rows_of_groups_are_taken_to_be_independent() -> None:
    assert REGIMES[IGNORED].homes(QUICK_HOMES).held < 0.8 * QUICK_HOMES


@pytest.mark.drill
@pytest.mark.parametrize("name", [*REGIMES.keys() - {IGNORED}])
def test_the_bound_holds_in_19_of_20_homes_of_every_regime(name: str) -> None:
    found = REGIMES[name].homes(HOMES)
    assert found.homes - found.held <= MOST


def judged(rows: int, seed: int = 0, labels: int = 2, hardest: float = 0.85) -> Judged:
    """Calibrated predictions."""
    random = np.random.default_rng(seed)
    probability = random.uniform(hardest, 1, rows)
    return Judged(probability, random.integers(0, labels, rows), random.random(rows) < probability)


def rows(probability: list[float], label: list[int]) -> Judged:
    """New predictions."""
    return Judged(np.array(probability), np.array(label), np.zeros(len(label), np.bool_))


def test_no_row_is_answered_if_too_few_rows_decide() -> None:
    groups = find_thresholds(judged(500), judged(fewest_rows(MAX_ERROR, 0.05) - 1, 1), MAX_ERROR, CONFIDENCE)
    assert [group.threshold for group in groups] == [None]
    assert review(judged(10, 2), groups).all()


def test_a_model_without_errors_answers_every_row() -> None:
    right = Judged(np.full(400, 0.6), np.zeros(400, np.int64), np.ones(400, np.bool_))
    (group,) = find_thresholds(right, right, MAX_ERROR, CONFIDENCE)
    assert group.threshold == 0.0 and group.answered == 400
    assert not review(rows([0.1], [0]), [group]).any()


def test_labels_with_enough_rows_have_thresholds_of_their_own_and_the_others_share_one() -> None:
    random = np.random.default_rng(0)

    def draw() -> Judged:
        label = random.choice(4, 3_000, p=[0.55, 0.4, 0.03, 0.02])
        probability = random.uniform(0.88, 1, 3_000)
        easy = np.where(label == 0, 1 - (1 - probability) / 10, probability)
        return Judged(probability, label, random.random(3_000) < easy)

    groups = find_thresholds(draw(), draw(), MAX_ERROR, CONFIDENCE)
    assert [group.label for group in groups] == [0, 1, None]
    easy, hard, rest = (group.threshold for group in groups)
    assert easy is not None and hard is not None and easy < hard
    assert rest is None  # 150 rows, which err too often
    assert review(rows([(easy + hard) / 2] * 4, [0, 1, 2, 3]), groups).tolist() == [False, True, True, True]


def test_a_label_that_validation_never_predicts_is_for_a_person_if_all_others_have_thresholds() -> None:
    groups = find_thresholds(judged(4_000), judged(4_000, 1), MAX_ERROR, CONFIDENCE)
    assert sorted(str(group.label) for group in groups) == ["0", "1"]
    assert review(rows([1.0], [2]), groups).all()


def test_the_upper_bound_is_that_of_clopper_and_pearson() -> None:
    (group,) = find_thresholds(judged(900, labels=1), judged(900, 1, labels=1), MAX_ERROR, CONFIDENCE)
    from scipy.stats import binomtest

    exact = binomtest(group.errors, group.answered).proportion_ci(0.9, method="exact").high  # one-sided: 0.95
    assert group.at_most == pytest.approx(exact, abs=1e-9)
    assert group.at_most <= MAX_ERROR


def test_groups_of_one_row_have_the_thresholds_of_rows() -> None:
    first, second = judged(2_000, hardest=0.9), judged(2_000, 1, hardest=0.9)
    alone = [replace(one, groups=Groups(np.arange(2_000))) for one in (first, second)]
    plain, grouped = (find_thresholds(*both, MAX_ERROR, CONFIDENCE) for both in ((first, second), alone))
    assert len(plain) == 2 and plain[0].threshold is not None
    for one, other in zip(plain, grouped, strict=True):
        assert replace(one, at_most=None) == replace(other, at_most=None)
        assert one.at_most == pytest.approx(other.at_most, abs=1e-8)


def test_copies_of_rows_decide_no_more_than_the_rows() -> None:
    few = fewest_rows(MAX_ERROR, 0.05)
    right = Judged(np.full(few, 0.9), np.zeros(few, np.int64), np.ones(few, np.bool_), Groups(np.arange(few)))
    (group,) = find_thresholds(right, right, MAX_ERROR, CONFIDENCE)
    assert group.threshold is not None
    copies = right.take(np.repeat(np.arange(few - 1), 10))
    (group,) = find_thresholds(copies, copies, MAX_ERROR, CONFIDENCE)
    assert group.threshold is None and group.rows == 10 * (few - 1)


@pytest.mark.parametrize("known", [19, 30, 200])
def test_a_set_has_the_true_label_as_often_as_asked_for(known: int) -> None:
    random, covered = np.random.default_rng(known), []
    for _ in range(4_000):
        scores = random.beta(3, 1, known + 1)
        covered.append(scores[-1] >= least_probability(scores[:-1], 0.95))
    assert 0.94 < np.mean(covered) < 0.95 + 1 / known + 0.01


@pytest.mark.parametrize("known", [19, 30, 200])
def test_a_set_has_the_true_label_of_a_row_of_a_further_group_as_often(known: int) -> None:
    random, covered, groups = np.random.default_rng(known), [], Groups(np.repeat(np.arange(known), 10))
    for _ in range(4_000):
        scores = random.beta(3, 1, known + 1)
        covered.append(scores[-1] >= least_probability(np.repeat(scores[:-1], 10), 0.95, groups))
    assert 0.94 < np.mean(covered) < 0.95 + 1 / known + 0.01


def test_a_set_has_every_label_if_too_few_rows_are_known() -> None:
    assert least_probability(np.array([0.9] * 18), 0.95) == 0.0
    assert least_probability(np.array([0.9] * 19), 0.95) == 0.9
    assert least_probability(np.array([0.9] * 180), 0.95, Groups(np.repeat(np.arange(18), 10))) == 0.0


def test_risk_and_coverage_count_rows_of_the_same_probability_together() -> None:
    found = Judged(np.array([0.9, 0.8, 0.8, 0.5]), np.zeros(4, np.int64), np.array([True, False, True, False]))
    coverage, risk = risk_coverage(found)
    assert coverage.tolist() == [0.25, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0.0, 1 / 3, 0.5])
