"""Pairs of models that are equally good by a metric, or of which the new one flips too many rows, in regimes where a
paired test may fail. N rows a trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.evaluation.predictions import Likelihoods, Numbers, OneLabel, Predictions
from training.programs.compare import CompareSettings, bound_flips, compare_models

Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], tuple[Predictions, Predictions]]
DISASTER_RATE, DISASTER_LOGIT = 0.005, 7.0


@dataclass(frozen=True)
class Regime:
    """The new model and the old one on N rows, as many times as requested."""

    metric: str
    rows: int
    draw: Draw
    margin: float = 0.0
    max_flips: float | None = None

    def false_promotions(self, trials: int, confidence: float = 0.95, seed: int = 0) -> int:
        """How many of the trials promote the new model."""
        random = np.random.default_rng(seed)
        settings = CompareSettings(
            **{"task": "sequence-classification", "split": "test", "champion": "m/1"},
            **{"metrics": [self.metric], "figure": self.metric, "less_is_better": [], "margin": self.margin},
            **{"confidence": confidence, "max_flips": self.max_flips},
        )
        return sum(passes(*self.draw(random, self.rows), settings) for _ in range(trials))


def passes(new: Predictions, old: Predictions, settings: CompareSettings) -> bool:
    """Whether the gate promotes the new model: it is better, and has few flips if their share is bounded."""
    flips = bound_flips(new, old, settings)
    return (flips is None or flips.few_enough) and compare_models(new, old, settings).better


def two_labels(margins: Floats, references: npt.NDArray[np.int64]) -> OneLabel:
    """A model with these logits of the true label against the other."""
    logits = np.where(references == 1, margins, -margins)
    ones = 1 / (1 + np.exp(-logits))
    return OneLabel(references, (logits > 0).astype(np.int64), np.stack([1 - ones, ones], axis=1), ["a", "b"])


def alike(positive: float = 0.5, gain: float = 0.0) -> Draw:
    """Exchangeable models of two labels, or with a gain in the logit of the true one."""

    def draw(random: np.random.Generator, rows: int) -> tuple[Predictions, Predictions]:
        references = (random.random(rows) < positive).astype(np.int64)
        hard = random.normal(1.5, 2, rows)
        new, old = (hard + random.standard_normal(rows) for _ in range(2))
        return two_labels(new + gain, references), two_labels(old, references)

    return draw


def disaster(random: np.random.Generator, rows: int) -> tuple[Predictions, Predictions]:
    """The new model is sure of everything, and wrong on rare rows; the old one has the same log loss, evenly."""
    references = random.integers(0, 2, rows)
    wrong = random.random(rows) < DISASTER_RATE
    mean = np.logaddexp(0, -DISASTER_LOGIT) + DISASTER_RATE * DISASTER_LOGIT
    old = -np.log(np.expm1(mean * random.uniform(0.5, 1.5, rows)))
    return two_labels(np.where(wrong, -1, 1) * DISASTER_LOGIT, references), two_labels(old, references)


def rare_classes(random: np.random.Generator, rows: int) -> tuple[Predictions, Predictions]:
    """Exchangeable models of four labels, of which two have few rows."""
    references = random.choice(4, size=rows, p=[0.6, 0.3, 0.06, 0.04])
    shared = random.standard_normal((rows, 4)) + 2 * np.eye(4)[references]

    def model() -> OneLabel:
        powers = np.exp(shared + random.standard_normal((rows, 4)))
        return OneLabel(references, powers.argmax(axis=1), powers / powers.sum(axis=1, keepdims=True), list("abcd"))

    return model(), model()


def losing(lost: float, gained: float) -> Draw:
    """Models of which the new one alone is right on a share of all rows, and the old one alone on another."""

    def draw(random: np.random.Generator, rows: int) -> tuple[Predictions, Predictions]:
        which = random.choice(3, size=rows, p=[lost, gained, 1 - lost - gained])
        references = random.integers(0, 2, rows)
        return two_labels(np.where(which == 0, -1.0, 1.0), references), two_labels(
            np.where(which == 1, -1.0, 1.0), references
        )

    return draw


def three_rows_differ(random: np.random.Generator, rows: int) -> tuple[Predictions, Predictions]:
    """Exchangeable models that differ in three rows only, so the new one is better in all of them once in 8 times."""
    references = random.integers(0, 2, rows)
    margins = np.ones((2, rows))
    margins[random.integers(0, 2, 3), range(3)] = 0.5
    return two_labels(margins[0], references), two_labels(margins[1], references)


def heavy_errors(random: np.random.Generator, rows: int) -> tuple[Predictions, Predictions]:
    """Exchangeable regressions whose errors have Student's t distribution with 3 degrees of freedom."""
    references = random.standard_normal(rows)
    new, old = (references + random.standard_t(3, rows) for _ in range(2))
    return Numbers(references, new), Numbers(references, old)


def long_rows(random: np.random.Generator, rows: int) -> tuple[Predictions, Predictions]:
    """Exchangeable language models on rows of very different lengths, of which few are much harder."""
    targets = random.geometric(1 / 60, rows)
    hard = random.lognormal(1, 0.8, rows)
    losses = [targets * hard * random.lognormal(0, 0.3, rows) for _ in range(2)]
    new, old = (Likelihoods(loss, targets, np.zeros_like(targets)) for loss in losses)
    return new, old


def _table() -> dict[str, Regime]:
    found: dict[str, Regime] = {}

    def add(name: str, metrics: str, rows: tuple[int, ...], draw: Draw, **more: Any) -> None:
        found.update({f"{name}-{m}-{n}": Regime(m, n, draw, **more) for m in metrics.split() for n in rows})

    add("alike", "log_loss accuracy f1", (10, 20, 50), alike())
    add("alike", "log_loss roc_auc matthews_correlation calibration_error", (50, 200), alike())
    add("rare label", "f1 roc_auc matthews_correlation", (100,), alike(positive=0.06))
    add("rare classes", "f1_macro recall_macro log_loss", (50, 200), rare_classes)
    add("ties", "accuracy f1", (50, 1000), losing(0.02, 0.02))
    add("worse by the margin", "accuracy", (50, 200, 1000), losing(0.1, 0.0), margin=-0.1)
    add("better by the margin", "accuracy", (200, 1000), losing(0.05, 0.10), margin=0.05)
    add("disaster", "log_loss", (200, 500, 1000), disaster)
    add("heavy errors", "mse rmse", (20, 200), heavy_errors)
    add("long rows", "perplexity", (20, 200), long_rows)
    # Better than the old one, but with more flips than allowed; and no better, with fewer of them.
    add("too many flips", "accuracy f1", (300, 1000), losing(0.0101, 0.1), max_flips=0.01)
    add("too many flips", "accuracy", (100, 5000), losing(0.0501, 0.2), max_flips=0.05)
    add("few flips", "accuracy f1", (300, 1000), losing(0.004, 0.004), max_flips=0.02)
    add("few flips and alike", "accuracy log_loss roc_auc", (200,), alike(), max_flips=0.3)
    return found


REGIMES = _table()
