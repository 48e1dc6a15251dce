"""A probability of 0.9 means that nine of ten such rows are right."""

from __future__ import annotations

import numpy as np
import pytest

from tests.abstention.regimes import Population, many_labels_a_row, one_label
from training.evaluation.calibration import (
    FEWEST_OF_EACH,
    calibration_error,
    fit_many_labels,
    fit_one_label,
    log_softmax,
)

ROWS = np.arange(3_000)
LATER = np.arange(3_000, 20_000)


def population(scale: float) -> Population:
    return one_label(scale=scale)(np.random.default_rng(0))


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_the_temperature_undoes_the_scale_of_the_logits(scale: float) -> None:
    rows = population(scale)
    fitted = rows.fit(ROWS)
    assert fitted.scale == pytest.approx(1 / scale, rel=0.05)
    assert (fitted.apply(rows.logits).argmax(axis=1) == rows.logits.argmax(axis=1)).all()


def test_probabilities_of_later_rows_are_calibrated() -> None:
    rows = population(4.0)
    probabilities = [np.exp(log_softmax(logits)) for logits in (rows.logits, rows.fit(ROWS).apply(rows.logits))]
    right = rows.logits.argmax(axis=1) == rows.truth
    before, after = (calibration_error(given.max(axis=1)[LATER], right[LATER]) for given in probabilities)
    assert before > 0.08
    assert after < 0.01


def test_a_model_without_an_error_keeps_its_probabilities_below_one() -> None:
    labels = np.array([0, 1, 0, 1])
    logits = np.where(np.eye(2)[labels] == 1, 4.0, -4.0)
    scale = fit_one_label(logits, labels).scale
    assert 0.5 < scale[0] < 2
    assert np.exp(log_softmax(logits * scale)).max() < 1


def test_labels_with_enough_rows_have_a_scale_and_an_offset_of_their_own() -> None:
    random = np.random.default_rng(1)
    true = random.normal(-1, 3, (4_000, 3))
    has = random.random(true.shape) < 1 / (1 + np.exp(-true))
    has[FEWEST_OF_EACH - 1 :, 2] = False  # rare
    logits = true * [2.0, 0.5, 1.0] + [1.0, -1.0, 0.0]
    fitted = fit_many_labels(logits, has)
    assert fitted.scale[:2] == pytest.approx([0.5, 2.0], rel=0.1)
    assert fitted.offset[:2] == pytest.approx([-0.5, 2.0], abs=0.25)
    assert fitted.offset[2] == 0.0


def test_probabilities_of_any_number_of_labels_are_calibrated() -> None:
    rows = many_labels_a_row(np.random.default_rng(0))
    probabilities = [1 / (1 + np.exp(-logits)) for logits in (rows.logits, rows.fit(ROWS).apply(rows.logits))]
    has = rows.truth.astype(np.bool_)
    before, after = (calibration_error(given[LATER].ravel(), has[LATER].ravel()) for given in probabilities)
    assert before > 0.02
    assert after < 0.01


def test_a_label_without_variety_does_not_break_the_fit() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (50, 2))
    fitted = fit_many_labels(logits, np.tile([True, False], (50, 1)))
    assert np.isfinite(fitted.apply(logits)).all()
