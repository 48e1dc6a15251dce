"""Rows of two models put together, and the worst cases that a paired test adds to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.training.calibration import REGIMES
from training.evaluation import metrics
from training.evaluation.choices import Choices
from training.evaluation.generated_texts import Generated
from training.evaluation.metrics.resampling import figures
from training.evaluation.predictions import Likelihoods, ManyLabels, Numbers, OneLabel, Predictions
from training.evaluation.preferences import Preferences, UnpairedPreferences
from training.evaluation.tagged_words import Tagged
from training.evaluation.tool_use import Conversations
from training.recipe.tables.metrics import RIGHT_OR_WRONG


def several(seed: int) -> ManyLabels:
    """Two of three labels a row, with thresholds of each model's own."""
    draw = np.random.default_rng(seed)
    references = np.tile([True, True, False], (30, 1))
    return ManyLabels(references, draw.random((30, 3)), np.full(3, 0.3 + 0.2 * seed), list("abc"))


def tagged(seed: int) -> Tagged:
    """Rows of one to three words."""
    draw = np.random.default_rng(seed)
    starts = np.cumsum([0, *([1, 2, 3] * 10)])
    words = draw.integers(0, 2, (2, 60))
    return Tagged(np.tile([0, 1], 30), words[0], draw.uniform(0.5, 1, 60), starts, ["O", "B-X"])


def written(seed: int) -> Generated:
    draw = np.random.default_rng(seed)
    texts = np.array(["a cat", "the dog", "no animal at all"], object)
    return Generated(np.tile(texts, 10), draw.choice(texts, 30))


def _pair(regime: str) -> tuple[Predictions, Predictions]:
    return REGIMES[regime].draw(np.random.default_rng(1), 30)


PAIRS: dict[str, tuple[Predictions, Predictions]] = {
    "log_loss": _pair("alike-log_loss-20"),
    "mse": _pair("heavy errors-mse-20"),
    "perplexity": _pair("long rows-perplexity-20"),
    "f1_macro": (several(0), several(1)),
    "accuracy": (tagged(0), tagged(1)),
    "bleu": (written(0), written(1)),
}


@pytest.mark.parametrize("metric", PAIRS)
def test_figures_of_joined_rows_are_those_of_each_model(metric: str) -> None:
    first, second = PAIRS[metric]
    both = first.concatenate(second)
    assert len(both) == 60
    half = np.repeat(np.eye(2, dtype=np.int32), 30, axis=1)
    expected = [metrics.compute([metric], one)[metric] for one in (first, second)]
    np.testing.assert_allclose(figures([metric], both)[metric](half), expected)
    np.testing.assert_allclose(both.take(np.arange(30, 60)).row_scores, second.row_scores)


@pytest.mark.parametrize("metric", PAIRS)
def test_a_worst_case_lowers_the_gain_of_the_new_model(metric: str) -> None:
    new, old = PAIRS[metric]
    sign = -1 if metric in ("log_loss", "mse", "perplexity") else 1

    def gain(*models: Predictions) -> float:
        one, other = (metrics.compute([metric], model)[metric] for model in models)
        return sign * (one - other)

    guards = new.worst_cases(old)
    alone = [(guards[0].take(np.array([row])), guards[1].take(np.array([row]))) for row in range(len(guards[0]))]
    with_it = [gain(new.concatenate(ours), old.concatenate(theirs)) for ours, theirs in alone]
    assert min(with_it) < gain(new, old)


def test_the_worst_case_of_a_model_that_is_sure_of_itself_is_that_it_is_wrong() -> None:
    new, old = _pair("disaster-log_loss-200")
    guards, others = new.worst_cases(old)
    assert (-np.log(guards.row_scores) > 6.9).all() and (others.row_scores > 0.5).all()
    lost = replace(new, probabilities=np.full((30, 2), np.nan))
    assert len(lost.worst_cases(old)[0]) == 1


def test_the_types_that_are_right_or_wrong_are_those_whose_class_says_so() -> None:
    classes = [OneLabel, ManyLabels, Numbers, Likelihoods, Tagged, Generated, Preferences, UnpairedPreferences, Choices]
    found = [kind.prediction_type for kind in [*classes, Conversations] if kind.correct is not Predictions.correct]
    assert set(found) == set(RIGHT_OR_WRONG)
