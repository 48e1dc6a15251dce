"""The project's own metrics by name: whether more of them is better, and which take labels as numbers.

Light to import, for recipes are checked by it; training/metrics has the metrics themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

_AVERAGES = ("macro", "micro", "weighted", "samples")
MORE_IS_BETTER = (
    "accuracy",
    *(name + average for name in ("f1", "precision", "recall") for average in ("", *(f"_{a}" for a in _AVERAGES))),
    *("matthews_correlation", "roc_auc", "pearson", "spearman", "r2"),
    "token_accuracy",
    *("bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match"),
)
LESS_IS_BETTER = ("log_loss", "calibration_error", "hamming_loss", "mse", "rmse", "mae", "perplexity")
METRICS = (*MORE_IS_BETTER, *LESS_IS_BETTER)
"""The metrics that recipes may name as they are; each task type has a list of those that fit it."""
OF_100 = ("bleu", "chrf")
"""Metrics that go up to 100, as they are told everywhere; of the others that are better with more, 1 is most."""
OF_NUMBERS = ("pearson", "spearman", "mse", "mae")
"""Those of them that take the labels' names as numbers, such as ratings."""


def more_is_better(figure: str) -> bool:
    """Whether a model with more of it is better; of a figure that the project does not know, unless it is a loss."""
    return figure not in LESS_IS_BETTER and not figure.endswith("loss")


def most_of(metric: str) -> int:
    """The largest value of one of MORE_IS_BETTER."""
    return 100 if metric in OF_100 else 1


def refusal_of_numbers(metric: str, labels: Iterable[str]) -> str | None:
    """Why a metric of numbers cannot be computed with these labels; None where all their names are numbers."""
    strange = next((label for label in labels if not _is_number(label)), None)
    if strange is None:
        return None
    return (
        f"{metric!r} is of numbers, and the label {strange!r} is none: choose another, or have labels such as 1 to 5."
    )


def _is_number(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False
