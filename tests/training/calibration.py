"""Pairs of models that are equally good by a metric, or of which the new one flips too many rows, in regimes where a
paired test may fail. N rows a trial, or G groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from training.evaluation import bootstrap, group_tests, metrics, significance
from training.evaluation.metrics import resampling
from training.evaluation.predictions import Likelihoods, Numbers, OneLabel, Predictions
from training.evaluation.row_groups import Groups
from training.programs.compare import CompareSettings, bound_flips, compare_models

Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], tuple[Predictions, Predictions]]
DrawInGroups = Callable[[np.random.Generator, Groups], tuple[Predictions, Predictions]]
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
        with pytest.MonkeyPatch.context() as patch:
            if self.max_flips is None:  # then no end of an interval decides, and finding it takes most of the time
                patch.setattr(group_tests, "BOUND_BISECTIONS", 0)
            return sum(self._passes(random, settings) for _ in range(trials))

    def _passes(self, random: np.random.Generator, settings: CompareSettings) -> bool:
        return passes(*self.draw(random, self.rows), settings)


@dataclass(frozen=True)
class GroupRegime(Regime):
    """The same on rows in groups; `rows` is the number of groups."""

    draw: DrawInGroups  # type: ignore[assignment]
    sizes: str = "10"
    """Rows of a group: one, ten, or any number, ten on average."""
    ignored: bool = False
    """Whether the test takes the rows for independent."""

    def _passes(self, random: np.random.Generator, settings: CompareSettings) -> bool:
        groups = draw_groups(random, self.rows, self.sizes)
        return passes(*self.draw(random, groups), settings, None if self.ignored else groups)


def draw_once(patch: pytest.MonkeyPatch) -> None:
    """The bootstrap's draws and the metrics are the same in each trial, and take most of the time: makes them once."""
    kept = lru_cache(maxsize=2)(lambda *which: tuple(bootstrap.draws(*which)))

    def draws(rows: int, number: int, seed: int, groups: npt.NDArray[np.int64] | None = None) -> Iterator[Any]:
        return iter(kept(rows, number, seed) if groups is None else bootstrap.draws(rows, number, seed, groups))

    patch.setattr(significance, "draws", draws)
    made: dict[Any, Any] = {}

    def make(names: Sequence[str], predicted: Predictions) -> Any:
        key = (*names, predicted.config_name)
        return made[key] if key in made else made.setdefault(key, metrics.make(names, predicted))

    patch.setattr(resampling, "make", make)
    patch.setattr(metrics, "compute", lambda names, predicted: metrics.compute_made(make(names, predicted), predicted))


def draw_groups(random: np.random.Generator, number: int, sizes: str) -> Groups:
    """So many groups of these sizes: a number, or `geometric`."""
    rows = random.geometric(0.1, number) if sizes == "geometric" else np.full(number, int(sizes))
    return Groups(np.repeat(np.arange(number), rows))


def passes(new: Predictions, old: Predictions, settings: CompareSettings, groups: Groups | None = None) -> bool:
    """Whether the gate promotes the new model: it is better, and has few flips if their share is bounded."""
    flips = bound_flips(new, old, settings, groups=groups)
    return (flips is None or flips.few_enough) and compare_models(new, old, settings, groups=groups).better


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


def clustered_labels(correlation: float) -> DrawInGroups:
    """Exchangeable models of four labels, of which two have few rows. The correlation is that of the labels, and of the
    models' errors, within a group."""

    def draw(random: np.random.Generator, groups: Groups) -> tuple[Predictions, Predictions]:
        rows = len(groups.numbers)
        own, of_group = (random.choice(4, size=size, p=[0.6, 0.3, 0.06, 0.04]) for size in (rows, len(groups.sizes)))
        references = np.where(random.random(rows) < correlation, of_group[groups.numbers], own)
        shared = _noise(random, groups, correlation, 4) + 2 * np.eye(4)[references]

        def model() -> OneLabel:
            powers = np.exp(shared + _noise(random, groups, correlation, 4))
            return OneLabel(references, powers.argmax(axis=1), powers / powers.sum(axis=1, keepdims=True), list("abcd"))

        return model(), model()

    return draw


def clustered_numbers(correlation: float) -> DrawInGroups:
    """Exchangeable regressions."""

    def draw(random: np.random.Generator, groups: Groups) -> tuple[Predictions, Predictions]:
        references = _noise(random, groups, correlation)
        new, old = (references + _noise(random, groups, correlation) for _ in range(2))
        return Numbers(references, new), Numbers(references, old)

    return draw


def _noise(random: np.random.Generator, groups: Groups, correlation: float, columns: int | None = None) -> Floats:
    """Normal numbers with this correlation within a group."""
    of_group, own = (
        random.standard_normal(size if columns is None else (size, columns))
        for size in (len(groups.sizes), len(groups.numbers))
    )
    return np.asarray(np.sqrt(correlation) * of_group[groups.numbers] + np.sqrt(1 - correlation) * own)


def lost_groups(lost: float, gained: float) -> DrawInGroups:
    """The new model alone loses all rows of a few groups, and gains single rows anywhere."""

    def draw(random: np.random.Generator, groups: Groups) -> tuple[Predictions, Predictions]:
        references = random.integers(0, 2, len(groups.numbers))
        loses = (random.random(len(groups.sizes)) < lost)[groups.numbers]
        gains = ~loses & (random.random(len(references)) < gained / (1 - lost))
        new, old = np.where(loses, -1.0, 1.0), np.where(gains, -1.0, 1.0)
        return two_labels(new, references), two_labels(old, references)

    return draw


def better_in_small_groups(random: np.random.Generator, groups: Groups) -> tuple[Predictions, Predictions]:
    """The new model gains a fifth of the rows of groups of fewer rows than usual, and loses as many of the others."""
    small = groups.sizes < groups.usual_size
    share = 0.2 * groups.sizes[small].sum() / max(1.0, groups.sizes[~small].sum())
    chance = np.where(small, 0.2, min(share, 1.0))[groups.numbers]
    references, differs = random.integers(0, 2, len(chance)), random.random(len(chance)) < chance
    new, old = (np.where(differs & (small[groups.numbers] == which), -1.0, 1.0) for which in (False, True))
    return two_labels(new, references), two_labels(old, references)


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


def _table_of_groups() -> dict[str, Regime]:
    found: dict[str, Regime] = {}

    def add(name: str, metrics: str, numbers: tuple[int, ...], sizes: str, draw: DrawInGroups, **more: Any) -> None:
        places = [(metric, number, size) for metric in metrics.split() for number in numbers for size in sizes.split()]
        found.update(
            {f"{name}-{m}-{n} of {size}": GroupRegime(m, n, draw, sizes=size, **more) for m, n, size in places}
        )

    for correlation in (0.0, 0.5, 1.0):
        name, sizes = f"groups, correlation {correlation:g}", "1 10 geometric"
        add(name, "accuracy f1_macro", (12, 30, 100), sizes, clustered_labels(correlation))
        add(name, "mae pearson", (12, 30), sizes, clustered_numbers(correlation))
    add("lost groups", "accuracy f1", (30, 100, 300), "10 geometric", lost_groups(0.03, 0.03))
    add("better in small groups", "accuracy", (30, 100, 300), "geometric", better_in_small_groups)
    add(
        "too many flips in groups",
        "accuracy",
        (100, 300, 1000),
        "10 geometric",
        lost_groups(0.0301, 0.2),
        max_flips=0.03,
    )
    return found


REGIMES = _table() | _table_of_groups()
