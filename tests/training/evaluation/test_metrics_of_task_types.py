"""Metrics of rows with any number of labels, and of numbers: what the libraries say, of all rows and of drawn ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import evaluate
import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from training.evaluation import metrics
from training.evaluation.bootstrap import draws
from training.evaluation.metrics.resampling import figures
from training.evaluation.predictions import ManyLabels, Numbers, Predictions
from training.problems import UserError
from training.recipe.tables.metrics import MANY_LABELS
from training.task_types import load

MANY, NUMBERS = load("multi-label-classification").metrics, load("regression").metrics


def labelled(rows: int, seed: int = 1) -> ManyLabels:
    """Rows with none to all of 5 labels, of which one is rare and one is on all rows; some probabilities are equal."""
    draw = np.random.default_rng(seed)
    references = draw.random((rows, 5)) < [0.5, 0.3, 0.3, 0.04, 1.0]
    probabilities = np.clip((draw.random((rows, 5)) + references) / 2, 0.01, 0.99).round(2)
    return ManyLabels(references, probabilities, np.array([0.5, 0.6, 0.3, 0.5, 0.5]), list("abcde"))


def numbered(rows: int, seed: int = 1) -> Numbers:
    """Some of which are equal."""
    draw = np.random.default_rng(seed)
    references = 100 + draw.normal(size=rows).round(1)
    return Numbers(references, references + draw.normal(size=rows).round(1) / 2)


def averaged(score: Callable[..., float], average: str, of: ManyLabels) -> float:
    """Of the labels, and for samples of the rows, that are there or predicted."""
    references, predictions = (side.astype(int) for side in (of.references, of.predictions))
    there = (references + predictions).any(axis=1 if average == "samples" else 0)
    where: Any = there if average == "samples" else (slice(None), there)
    return score(references[where], predictions[where], average=average, zero_division=0)


def roc_auc(of: ManyLabels) -> float:
    judged = [label for label in range(5) if 0 < of.references[:, label].sum() < len(of)]
    areas = [sklearn_metrics.roc_auc_score(of.references[:, n], of.probabilities[:, n]) for n in judged]
    return float(np.mean(areas)) if areas else math.nan


def log_loss(of: ManyLabels) -> float:
    columns = zip(of.references.T, of.probabilities.T, strict=True)
    return float(np.mean([sklearn_metrics.log_loss(has, given, labels=[False, True]) for has, given in columns]))


def of_numbers(score: Callable[..., Any], of: Numbers) -> float:
    if score is sklearn_metrics.r2_score and not np.ptp(of.references):
        return math.nan
    found = score(of.references, of.predictions)
    return getattr(found, "statistic", found)


DIRECTLY: dict[str, Callable[[Any], float]] = {
    "accuracy": lambda of: sklearn_metrics.accuracy_score(of.references, of.predictions),
    **{
        f"{name}_{average}": partial(averaged, getattr(sklearn_metrics, f"{name}_score"), average)
        for name in ("f1", "precision", "recall")
        for average in ("macro", "micro", "weighted", "samples")
    },
    "hamming_loss": lambda of: sklearn_metrics.hamming_loss(of.references, of.predictions),
    "roc_auc": roc_auc,
    "log_loss": log_loss,
    "mse": partial(of_numbers, sklearn_metrics.mean_squared_error),
    "rmse": partial(of_numbers, sklearn_metrics.root_mean_squared_error),
    "mae": partial(of_numbers, sklearn_metrics.mean_absolute_error),
    "r2": partial(of_numbers, sklearn_metrics.r2_score),
    "pearson": partial(of_numbers, stats.pearsonr),
    "spearman": partial(of_numbers, stats.spearmanr),
}
BOTH = [(MANY, labelled), (NUMBERS, numbered)]


@pytest.mark.parametrize(("names", "rows"), BOTH, ids=["labels", "numbers"])
def test_every_metric_of_the_task_type_equals_that_of_the_library(
    names: list[str], rows: Callable[[int], Predictions]
) -> None:
    of = rows(300)
    assert metrics.compute(names, of) == pytest.approx({name: DIRECTLY[name](of) for name in names}, abs=1e-12)


@pytest.mark.filterwarnings("ignore")  # the libraries warn of what has no value
@pytest.mark.parametrize(("names", "rows"), BOTH, ids=["labels", "numbers"])
def test_figures_of_drawn_rows_equal_those_of_the_library_on_those_rows(
    names: list[str], rows: Callable[[int], Predictions]
) -> None:
    """Also of a draw of one row alone, where correlations have no value."""
    of = rows(24)
    (counts,) = draws(len(of), 12, seed=3)
    counts = np.concatenate([counts, np.eye(24, dtype=np.int32)[:1] * 24])
    found = figures(names, of)
    assert list(found) == list(names)
    for name, figure in found.items():
        expected = [DIRECTLY[name](of.take(np.repeat(np.arange(24), count))) for count in counts]
        np.testing.assert_allclose(figure(counts), expected, rtol=0, atol=1e-12, err_msg=name)


def test_evaluate_computes_the_same_metrics_by_itself() -> None:
    of = labelled(50)
    together = evaluate.combine([metrics.load_class(name, MANY_LABELS)(config_name="multilabel") for name in MANY])
    given = of.predictions.astype(int), of.references.astype(int), of.probabilities
    names = ("predictions", "references", "prediction_scores")
    assert together.compute(**dict(zip(names, given, strict=True))) == pytest.approx(metrics.compute(MANY, of))


def test_weights_that_became_no_numbers_give_figures_without_a_value_and_no_error() -> None:
    lost = Numbers(np.array([1.0, 2.0, 3.0]), np.array([1.0, np.nan, 3.0]))
    assert all(math.isnan(value) for value in metrics.compute(NUMBERS, lost).values())
    counts = np.ones((1, 3), np.int32)
    assert all(np.isnan(figure(counts)) for figure in figures(NUMBERS, lost).values())
    many = ManyLabels(np.eye(2, dtype=bool), np.full((2, 2), np.nan), np.full(2, 0.5), ["a", "b"])
    found = metrics.compute(MANY, many)
    assert {name for name, value in found.items() if math.isnan(value)} == {"roc_auc", "log_loss"}
    assert {name for name, figure in figures(MANY, many).items() if np.isnan(figure(counts[:, :2]))} == {
        "roc_auc",
        "log_loss",
    }


@pytest.mark.parametrize(("name", "rows"), [("mse", labelled(3)), ("f1_micro", numbered(3))])
def test_a_metric_of_another_kind_is_refused(name: str, rows: Predictions) -> None:
    with pytest.raises(UserError, match=f"'{name}' does not fit a (classification|regression).*: choose from "):
        metrics.compute([name], rows)


def test_metric_of_the_users_own_is_given_which_labels_each_row_has() -> None:
    of = labelled(20)
    assert metrics.compute([f"{__name__}:Labels"], of) == {"labels": of.predictions.sum()}
    assert np.isfinite(figures([f"{__name__}:Labels"], of)["labels"](np.ones((1, 20), np.int32)))


class Labels(metrics.LabelMetric):
    """How many labels are predicted."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"labels": predictions.sum()}
