"""Accuracy without labels: confidence-based performance estimation (CBPE).

The probability that a prediction is right is estimated from the model's confidence, by a calibration that is learned
on reference rows with labels. Its mean over new rows estimates their accuracy. It holds as long as equally confident
predictions are right as often as on the reference rows, so it cannot see labels that changed their meaning.

Guo et al., On Calibration of Modern Neural Networks (2017); Platt (1999); Zadrozny and Elkan (2002) for isotonic
regression.

N reference rows, M new rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.evaluation.drift.effects import Floats

FOLDS = 5
DRAWS = 200
LEAST_OF_EACH = 10
"""Right predictions, and wrong ones, that an estimate needs among the reference rows."""
CAVEAT = "It is estimated from the model's confidence, and cannot see labels that changed their meaning."

Bools = npt.NDArray[np.bool_]
Calibrate = Callable[[Floats], Floats]


@dataclass(frozen=True)
class EstimatedAccuracy:
    """The estimated accuracy on new rows, and the true one on the reference rows."""

    value: float
    low: float
    high: float
    """Ends of the interval for the accuracy on exactly these rows."""
    reference: float
    method: str
    """The calibration, `isotonic` or `platt`."""


def estimate_accuracy(
    confidence: Floats, correct: Bools, new_confidence: Floats, level: float = 0.95, seed: int = 0
) -> EstimatedAccuracy:
    """Estimates the accuracy on the new rows.

    Args:
        confidence: (N,) the probability of the predicted label on the reference rows, which the model has not trained
            on.
        correct: (N,) whether it was the true label.
        new_confidence: (M,)
        level: Of the interval, which covers three sources of chance: the reference rows (by the bootstrap), the choice
            of the calibration's parameters with them, and the labels of the new rows.
        seed: Of the bootstrap.
    """
    method = _choose_method(confidence, correct)
    random = np.random.default_rng(seed)
    value = float(_fit(method, confidence, correct)(new_confidence).mean())
    draws = np.empty(DRAWS)
    for draw in range(DRAWS):
        rows = random.integers(0, len(confidence), len(confidence))
        chances = _fit(method, confidence[rows], correct[rows])(new_confidence)
        draws[draw] = (random.random(len(chances)) < chances).mean()
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return EstimatedAccuracy(value, float(min(low, value)), float(max(high, value)), float(correct.mean()), method)


def _choose_method(confidence: Floats, correct: Bools) -> str:
    """The calibration with the smaller log loss on rows that it was not learned from."""
    fold = np.arange(len(correct)) % FOLDS
    np.random.default_rng(0).shuffle(fold)
    losses = {}
    for method in ("platt", "isotonic"):
        chances = np.empty(len(correct))
        for held_out in range(FOLDS):
            rest = fold != held_out
            chances[~rest] = _fit(method, confidence[rest], correct[rest])(confidence[~rest])
        losses[method] = -np.log(np.where(correct, chances, 1 - chances)).mean()
    return min(losses, key=lambda name: losses[name])


def _fit(method: str, confidence: Floats, correct: Bools) -> Calibrate:
    """The function from confidences to probabilities of being right, within half a row of 0 and 1."""
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

    rows, right = len(correct), int(correct.sum())
    least = 0.5 / (rows + 1)
    if right in (0, rows):
        return lambda given: np.full(len(given), (right + 0.5) / (rows + 1))
    if method == "isotonic":
        model = IsotonicRegression(y_min=least, y_max=1 - least, out_of_bounds="clip").fit(confidence, correct)
        return lambda given: np.asarray(model.predict(given), np.float64)
    logistic = LogisticRegression(C=100.0, solver="newton-cholesky").fit(_logits(confidence), correct)
    return lambda given: np.clip(logistic.predict_proba(_logits(given))[:, 1], least, 1 - least)


def _logits(confidence: Floats) -> Floats:
    """(N, 1)"""
    clipped = np.clip(confidence, 1e-6, 1 - 1e-6)
    return np.asarray(np.log(clipped / (1 - clipped)))[:, None]
