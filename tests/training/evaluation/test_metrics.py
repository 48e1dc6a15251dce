"""Metrics without a network: equal to the libraries they are of, alone, together, on drawn rows, and the user's own."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import evaluate
import numpy as np
import pytest
from datasets import Features, List, Value
from scipy import stats
from sklearn import metrics as sklearn_metrics

from docs import reference_tables
from tests.raised import raised_problems
from tests.task_types import recipe_of
from training.evaluation import metrics
from training.evaluation.bootstrap import draws
from training.evaluation.metrics.numbers import Mae
from training.evaluation.metrics.resampling import figures
from training.evaluation.predictions import Numbers, OneLabel
from training.programs.compare import CompareSettings, compare_models
from training.recipe import parse
from training.recipe.tables.metrics import METRICS as TABLE
from training.recipe.tables.metrics import NUMBERS, ONE_LABEL, TAGS, Metric, metrics_for
from training.task_types import load
from training.task_types.regression import Regression

ROOT = Path(__file__).parents[3]
METRICS = load("sequence-classification").metrics


def sure(predictions: Any, references: Any, labels: list[str]) -> OneLabel:
    """Rows predicted with probability 1."""
    return OneLabel(np.array(references), np.array(predictions), np.eye(len(labels))[predictions], labels)


def guessed(labels: list[str], rows: int, seed: int = 1) -> OneLabel:
    """Rows with some right predictions, some probabilities that are equal, and a label that is rare."""
    draw = np.random.default_rng(seed)
    references = np.minimum(draw.integers(0, 3 * len(labels), rows), len(labels) - 1)[::-1]
    logits = draw.normal(size=(rows, len(labels))).round(1) + 1.5 * np.eye(len(labels))[references]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return OneLabel(references, probabilities.argmax(axis=1), probabilities, labels)


# two labels: 3 hits of 5; label 1 predicted 3 times, twice rightly, and there 3 times
TWO = sure([1, 1, 1, 0, 0], [1, 1, 0, 1, 0], ["no", "yes"])
NAMES = ["accuracy", "f1", "precision", "recall"]


def test_metrics_of_the_second_label_say_so_where_most_rows_have_it() -> None:
    labels = [1] * 20 + [0] * 5
    most = sure(labels, labels, ["fraud", "ok"])
    assert metrics.remarks(["accuracy", "f1", "precision", "recall", "f1_macro", "roc_auc"], most) == [
        "f1, precision, recall: computed for 'ok', the label of 20 of 25 rows: for 'fraud', set data.label_names: "
        "[ok, fraud]."
    ]
    few = sure(labels[:12], labels[:12], ["fraud", "ok"])
    rare = sure(labels[::-1], [1 - label for label in labels], ["ok", "suspicious"])
    assert metrics.remarks(["f1"], few) == metrics.remarks(["f1"], rare) == []


# The libraries, called directly


def averaged(score: Callable[..., float], average: str, of: OneLabel) -> float:
    usual = "binary" if len(of.labels) == 2 else "macro"
    if (average or usual) == "binary" and not (
        of.references.any() or (of.predictions.any() and "recall" not in str(score))
    ):
        return math.nan  # nothing to find
    return score(of.references, of.predictions, average=average or usual, zero_division=0)


def matthews(of: OneLabel) -> float:
    return sklearn_metrics.matthews_corrcoef(of.references, of.predictions) if np.ptp(of.references) else math.nan


def roc_auc(of: OneLabel) -> float:
    if len(of.labels) == 2:
        return sklearn_metrics.roc_auc_score(of.references, of.probabilities[:, 1])
    every = range(len(of.labels))
    return sklearn_metrics.roc_auc_score(of.references, of.probabilities, multi_class="ovr", labels=every)


def calibration_error(of: OneLabel) -> float:
    """As in Guo et al., On calibration of modern neural networks (2017), a bin at a time."""
    confidence, right = of.probabilities.max(axis=1), of.probabilities.argmax(axis=1) == of.references
    error = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def numbers(score: Callable[..., Any], of: OneLabel) -> float:
    as_number = np.array([float(label) for label in of.labels])
    found = score(as_number[of.references], as_number[of.predictions])
    return getattr(found, "statistic", found)


DIRECTLY: dict[str, Callable[[OneLabel], float]] = {
    "accuracy": lambda of: sklearn_metrics.accuracy_score(of.references, of.predictions),
    **{
        f"{name}_{average}".rstrip("_"): partial(averaged, getattr(sklearn_metrics, f"{name}_score"), average)
        for name in ("f1", "precision", "recall")
        for average in ("", "macro", "micro", "weighted")
    },
    "matthews_correlation": matthews,
    "roc_auc": roc_auc,
    "log_loss": lambda of: sklearn_metrics.log_loss(of.references, of.probabilities, labels=range(len(of.labels))),
    "calibration_error": calibration_error,
    "pearson": partial(numbers, stats.pearsonr),
    "spearman": partial(numbers, stats.spearmanr),
    "mse": partial(numbers, sklearn_metrics.mean_squared_error),
    "mae": partial(numbers, sklearn_metrics.mean_absolute_error),
}
LABELS = [["0", "1"], ["1", "2.5", "10"], [str(n) for n in range(12)]]


@pytest.mark.parametrize("labels", LABELS, ids=len)
def test_every_metric_equals_that_of_the_library_called_directly(labels: list[str]) -> None:
    assert DIRECTLY.keys() == set(METRICS)
    rows = guessed(labels, 300)
    assert metrics.compute(METRICS, rows) == pytest.approx({n: f(rows) for n, f in DIRECTLY.items()}, abs=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the libraries warn of what has no value
@pytest.mark.parametrize("labels", LABELS, ids=len)
def test_figures_of_drawn_rows_equal_those_of_the_library_on_those_rows(labels: list[str]) -> None:
    """Also of draws in which labels are missing, or all predictions are alike."""
    rows = guessed(labels, 24)
    (counts,) = draws(len(rows), 12, seed=3)
    lone = np.eye(len(rows), dtype=np.int32)[:1] * 5  # one row five times
    counts = np.concatenate([counts, np.ones((1, len(rows)), np.int32), lone])
    found = figures(METRICS, rows)
    assert list(found) == list(METRICS)
    unknown = 0
    for name, figure in found.items():
        drawn = figure(counts)
        expected = [DIRECTLY[name](rows.take(np.repeat(np.arange(len(rows)), count))) for count in counts]
        np.testing.assert_allclose(drawn, expected, rtol=0, atol=1e-12, err_msg=name)
        assert drawn[-2] == pytest.approx(metrics.compute([name], rows)[name], abs=1e-12, nan_ok=True)
        unknown += np.isnan(drawn).sum()
    assert unknown > 3  # roc_auc, pearson and spearman of the lone row, and more


def on(predictions: Any, references: Any, scores: Any = None) -> OneLabel:
    names = [str(n) for n in range(1 + max(*predictions, *references))]
    scores = np.eye(len(names))[predictions] if scores is None else np.array(scores)
    return OneLabel(np.array(references), np.array(predictions), scores, names)


SIX = on([0, 2, 1, 0, 0, 1], [0, 1, 2, 0, 1, 2])
FOUR = [[0.1, 0.9], [0.9, 0.1], [0.8, 0.2], [0.35, 0.65]]
UNSURE = [[0.25, 0.20, 0.55], [0.55, 0.05, 0.40], [0.10, 0.30, 0.60], [0.90, 0.05, 0.05]]


def columns(first: list[float], second: list[float]) -> OneLabel:
    """Numbers as labels."""
    names = sorted({*first, *second})
    places = [[names.index(number) for number in column] for column in (first, second)]
    return sure(places[1], places[0], [str(name) for name in names])


@pytest.mark.parametrize(
    ("name", "rows", "value"),
    [
        # The examples of scikit-learn's reference pages of 1.9 (of roc_auc_score: 0.13)
        ("accuracy", on([0, 2, 1, 3], [0, 1, 2, 3]), 0.5),
        ("f1_macro", SIX, 0.267),
        ("f1_micro", SIX, 0.333),
        ("f1_weighted", SIX, 0.267),
        ("precision_macro", SIX, 0.222),
        ("precision_micro", SIX, 0.333),
        ("precision_weighted", SIX, 0.222),
        ("recall_macro", SIX, 0.333),
        ("recall_micro", SIX, 0.333),
        ("recall_weighted", SIX, 0.333),
        ("matthews_correlation", on([1, 0, 1, 1], [1, 1, 1, 0]), -0.333),
        ("roc_auc", on([0, 0, 0, 1], [0, 0, 1, 1], [[0.9, 0.1], [0.6, 0.4], [0.65, 0.35], [0.2, 0.8]]), 0.75),
        ("log_loss", on([1, 0, 0, 1], [1, 0, 0, 1], FOUR), 0.21616),
        ("mse", columns([3, -0.5, 2, 7], [2.5, 0, 2, 8]), 0.375),
        ("mae", columns([3, -0.5, 2, 7], [2.5, 0, 2, 8]), 0.5),
        # Those of SciPy's of 1.17
        ("pearson", columns([1, 2, 3, 4, 5, 6, 7], [10, 9, 2.5, 6, 4, 3, 2]), -0.828503883588428),
        ("spearman", columns([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]), 0.8207826816681233),
        # TorchMetrics' of MulticlassCalibrationError; its three bins hold what the fifteen do
        ("calibration_error", on([2, 0, 2, 0], [0, 1, 2, 0], UNSURE), 0.2),
    ],
)
def test_published_examples(name: str, rows: OneLabel, value: float) -> None:
    assert metrics.compute([name], rows)[name] == pytest.approx(value, abs=5e-4 if value == round(value, 3) else 1e-5)


def test_two_labels_are_scored_by_the_one_with_index_1() -> None:
    assert metrics.compute(NAMES, TWO) == {"accuracy": 3 / 5, "f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3}


def test_three_labels_of_which_two_occur_are_still_scored_by_the_mean() -> None:
    assert metrics.compute(["recall"], sure([0, 0], [0, 1], ["a", "b", "c"])) == {"recall": 1 / 2}


def test_label_that_is_never_predicted_counts_as_nothing_found() -> None:
    found = metrics.compute(NAMES, sure([0, 0], [0, 1], ["no", "yes"]))
    assert found == {"accuracy": 1 / 2, "f1": 0.0, "precision": 0.0, "recall": 0.0}


@pytest.mark.filterwarnings("ignore:A single label was found")
def test_a_metric_without_a_value_is_no_number_and_no_error() -> None:
    alike = metrics.compute(METRICS, sure([0, 0], [0, 0], ["1", "2"]))
    without = {"roc_auc", "pearson", "spearman", "matthews_correlation", "f1", "precision", "recall"}
    assert {name for name, value in alike.items() if math.isnan(value)} == without
    lost = OneLabel(TWO.references, TWO.predictions, np.full((5, 2), np.nan), ["1", "2"])
    names = {"roc_auc", "log_loss", "calibration_error"}
    assert {name for name, value in metrics.compute(METRICS, lost).items() if math.isnan(value)} == names
    counts = np.ones((1, 5), np.int32)
    assert {name for name, figure in figures(METRICS, lost).items() if np.isnan(figure(counts))} == names


def test_all_metrics_combine_as_those_of_evaluate_do() -> None:
    rows = guessed(["0", "1", "2"], 50)
    together = evaluate.combine([metrics.load_class(name, ONE_LABEL)() for name in METRICS])
    given = {"predictions": rows.predictions, "references": rows.references, "prediction_scores": rows.probabilities}
    assert together.compute(**given) == pytest.approx(metrics.compute(METRICS, rows), abs=1e-12)


# The user's own


class Hits(evaluate.Metric):
    """How many are right: what a user would write."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("int64"), "references": Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        hits = sum(a == b for a, b in zip(predictions, references, strict=True))
        return {"hits": hits, "misses": len(references) - hits}


class Given(evaluate.Metric):
    """Keeps what it is given, of all types that a metric may ask for."""

    def _info(self) -> evaluate.MetricInfo:
        scores = Value("float32") if self.config_name == "binary" else List(Value("float32"))
        features = {"predictions": Value("string"), "references": Value("float32"), "prediction_scores": scores}
        info = {"description": "", "citation": "", "inputs_description": ""}
        return evaluate.MetricInfo(**info, features=Features(features))

    def _compute(self, **given: Any) -> dict[str, float]:
        self.given.append(given)
        return {"first": given["references"][0]}

    given: list[dict[str, Any]] = []  # noqa: RUF012


class Odd(metrics.ScoreMetric):
    """Gives what is no number, and refuses draws without label 0."""

    def _compute(self, prediction_scores: Any, references: Any) -> Any:
        if (references != 0).all():
            raise ValueError("no label 0")
        return (
            {"rows": len(references), "scores": float(prediction_scores.sum())} if len(references) > 1 else {"a": "b"}
        )


def test_metric_of_the_users_own_is_found_by_its_path_and_keeps_every_number() -> None:
    found = metrics.compute(["accuracy", f"{__name__}:Hits"], TWO)
    assert found == {"accuracy": 3 / 5, "hits": 3.0, "misses": 2.0}


def test_metric_of_the_users_own_gets_the_drawn_rows_themselves() -> None:
    rows = guessed(["a", "b", "c"], 20)
    (counts,) = draws(len(rows), 7, seed=0)
    found = figures(["accuracy", f"{__name__}:Hits", f"{__name__}:Odd"], rows)
    assert list(found) == ["accuracy", "hits", "misses", "rows", "scores"]
    np.testing.assert_allclose(found["hits"](counts) / 20, found["accuracy"](counts), atol=1e-12)
    np.testing.assert_allclose(found["hits"](counts) + found["misses"](counts), 20)
    without = np.zeros((1, 20), np.int32)
    without[0, rows.references == 1] = 2
    assert np.isnan(found["scores"](without)[0]) and found["scores"](counts)[0] == pytest.approx(20)


def test_metric_gets_names_numbers_or_probabilities_as_its_features_ask() -> None:
    metrics.compute([f"{__name__}:Given"], OneLabel(np.array([1]), np.array([0]), np.array([[0.75, 0.25]]), ["3", "5"]))
    metrics.compute([f"{__name__}:Given"], OneLabel(np.array([1]), np.array([0]), np.eye(3)[:1], ["3", "5", "7"]))
    assert Given.given[-2] == {"predictions": ["3"], "references": [5.0], "prediction_scores": [0.25]}
    assert Given.given[-1] == {"predictions": ["3"], "references": [5.0], "prediction_scores": [[1.0, 0.0, 0.0]]}


def refusals(names: list[str], rows: OneLabel = TWO) -> list[str]:
    problems = raised_problems(metrics.compute, names, rows)
    assert all(problem.where.startswith("evaluation.metrics") for problem in problems)
    return [problem.message for problem in problems]


def test_all_metrics_that_cannot_be_used_are_named_together() -> None:
    names = ["accurracy", "nowhere:Metric", f"{__name__}:Hitz", f"{__name__}:ROOT", "mse", f"{__name__}:Given"]
    unknown, nowhere, near, other, number, own = refusals(names)
    assert "Did you mean 'accuracy'?" in unknown and "nowhere" in nowhere and "Did you mean 'Hits'?" in near
    assert other.endswith("it must be a subclass of evaluate.Metric.")
    assert number.startswith("'mse' needs numbers, and the label 'no' is not one") and "Given" in own


def test_a_metric_that_returns_no_number_is_reported() -> None:
    (message,) = refusals([f"{__name__}:Odd"], TWO.take(np.array([2])))
    assert message.endswith("returned 'a' as str: it must be a number.")


def test_the_tables_of_the_reference_page_are_the_metrics_descriptions_of_themselves() -> None:
    for table, names, prediction_type in (
        (reference_tables.metrics(), [*TABLE], None),
        (reference_tables.span_metrics(), metrics_for(TAGS), TAGS),
    ):
        rows = table.splitlines()[2:]
        assert len(rows) == len(names)
        for row, name in zip(rows, names, strict=True):
            description = metrics.load_class(name, prediction_type).describe()
            assert row == f"| `{name}` | {description} | {'more' if TABLE[name].more_is_better else 'less'} |"


def test_values_lie_in_the_range_of_the_table_and_agreement_is_better() -> None:
    for seed in range(5):
        rows = guessed(["1", "2", "3"], 40, seed)
        right = OneLabel(rows.references, rows.references, np.eye(3)[rows.references], rows.labels)
        found, best = metrics.compute(METRICS, rows), metrics.compute(METRICS, right)
        for name, value in found.items():
            least, most = ends(TABLE[name])
            assert least <= value <= most, name
            assert best[name] > value if TABLE[name].more_is_better else best[name] < value, name


def ends(metric: Metric) -> tuple[float, float]:
    """The range of a metric's entry."""
    return -math.inf if metric.least is None else metric.least, math.inf if metric.most is None else metric.most


@pytest.mark.parametrize("name", TABLE)
def test_an_entry_has_the_range_that_its_classes_describe_and_they_give_the_figure_its_name(name: str) -> None:
    for prediction_type in TABLE[name].classes:
        found = metrics.load_class(name, prediction_type)
        ((low, high),) = re.findall(r"From (-?\d+|minus infinity) (?:to (\d+)|up)", found.describe())
        assert ends(TABLE[name]) == (float(low.replace("minus infinity", "-inf")), float(high or math.inf))
        assert found(keep_in_memory=True).name == name


@pytest.mark.slow
def test_scoring_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, training.programs.score, training.evaluation.metrics.resampling; "
    code += "print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_metric_is_a_class_and_a_line_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HalfError(Mae):
        def of_rows(self, predictions: Any, references: Any) -> Any:
            return super().of_rows(predictions, references) / 2

    added: Any = ModuleType("training.evaluation.metrics.added")
    added.HalfError = HalfError
    monkeypatch.setitem(sys.modules, added.__name__, added)
    monkeypatch.setitem(TABLE, "half_error", Metric({NUMBERS: "added:HalfError"}, more_is_better=False, most=None))
    monkeypatch.setattr(Regression, "metrics", metrics_for(NUMBERS))  # it may be imported already
    recipe = recipe_of("regression", tmp_path) | {"evaluation": {"metrics": ["half_error"], "splits": ["validation"]}}
    assert parse(recipe).evaluation.metrics == ["half_error"]
    references = np.arange(40.0)
    new, old = Numbers(references, references + 1), Numbers(references, references + 3)
    settings = CompareSettings(
        **{"task": "regression", "split": "test", "metrics": ["half_error"], "figure": "half_error"},
        **{"less_is_better": [], "margin": 0.0, "confidence": 0.95, "champion": "m/1"},
    )
    found = compare_models(new, old, settings)
    assert (found.value, found.champion_value, found.gain, found.better) == (0.5, 1.5, 1.0, True)
