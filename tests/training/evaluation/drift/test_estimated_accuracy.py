"""The accuracy without labels: its interval has the true one, as long as labels mean the same."""

from __future__ import annotations

import numpy as np
import pytest

from training.evaluation.drift import estimated_accuracy
from training.evaluation.drift.estimated_accuracy import estimate_accuracy


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark of `tests/drift` has all."""
    monkeypatch.setattr(estimated_accuracy, "DRAWS", 80)


def rows(random: np.random.Generator, number: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Confidences of an overconfident model, and whether it is right. With a shift, there are more hard rows."""
    logits = np.abs(random.normal(2.0 - shift, 1.5, number))
    return 1 / (1 + np.exp(-logits)), random.random(number) < 1 / (1 + np.exp(-0.5 * logits))


@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_the_interval_has_the_true_accuracy_in_nine_of_ten_cases(shift: float) -> None:
    covered, errors = 0, []
    for trial in range(12):
        random = np.random.default_rng([trial, 1])
        confidence, correct = rows(random, 600)
        new, truth = rows(random, 400, shift)
        found = estimate_accuracy(confidence, correct, new, seed=trial)
        covered += found.low <= truth.mean() <= found.high
        errors.append(found.value - truth.mean())
    assert covered >= 10
    assert abs(np.mean(errors)) < 0.015


def test_the_estimate_corrects_an_overconfident_model() -> None:
    random = np.random.default_rng(2)
    confidence, correct = rows(random, 2000)
    found = estimate_accuracy(confidence, correct, rows(random, 500)[0])
    assert confidence.mean() - correct.mean() > 0.1 and abs(found.value - correct.mean()) < 0.03
    assert found.reference == correct.mean()


@pytest.mark.parametrize("right", [0, 60])
def test_reference_rows_that_are_all_right_or_all_wrong_leave_some_doubt(right: int) -> None:
    found = estimate_accuracy(np.linspace(0.5, 1, 60), np.arange(60) < right, np.linspace(0.5, 1, 50))
    assert 0 < found.value < 1


def test_labels_that_changed_their_meaning_are_not_seen() -> None:
    """The caveat of every report, as a fact."""
    random = np.random.default_rng(3)
    confidence, correct = rows(random, 1000)
    new, truth = rows(random, 1000)
    found = estimate_accuracy(confidence, correct, new)
    assert found.low > (~truth).mean() + 0.1
