"""Metrics without a network, alone, together, and the user's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest
from datasets import Features, Value

from training import metrics
from training.problems import UserError

# two labels: 3 hits of 5; label 1 predicted 3 times, twice rightly, and there 3 times
TWO = np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 1, 0])
NAMES = list(metrics.METRICS)


class Hits(evaluate.Metric):
    """How many are right: what a user would write."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("int64"), "references": Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        hits = sum(a == b for a, b in zip(predictions, references, strict=True))
        return {"hits": hits, "misses": len(references) - hits}


def test_two_labels_are_scored_by_the_one_with_index_1() -> None:
    found = metrics.compute(NAMES, *TWO, labels=["no", "yes"])
    assert found == {"accuracy": 3 / 5, "f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3}


def test_more_labels_are_scored_by_the_mean_over_the_labels() -> None:
    predictions, references = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2])
    found = metrics.compute(NAMES, predictions, references, labels=["a", "b", "c"])
    assert found["precision"] == pytest.approx((1 / 2 + 1 + 1) / 3)
    assert found["recall"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert found["f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


def test_three_labels_of_which_two_occur_are_still_scored_by_the_mean() -> None:
    found = metrics.compute(["recall"], np.array([0, 0]), np.array([0, 1]), labels=["a", "b", "c"])
    assert found == {"recall": 1 / 2}


def test_label_that_is_never_predicted_counts_as_nothing_found() -> None:
    found = metrics.compute(NAMES, np.array([0, 0]), np.array([0, 1]), labels=["no", "yes"])
    assert found == {"accuracy": 1 / 2, "f1": 0.0, "precision": 0.0, "recall": 0.0}


def test_metrics_combine_as_those_of_evaluate_do() -> None:
    together = evaluate.combine([metrics.Accuracy(), metrics.F1(), metrics.Precision(), metrics.Recall()])
    found = together.compute(predictions=TWO[0], references=TWO[1])
    assert found == metrics.compute(NAMES, *TWO, labels=["no", "yes"])


def test_metric_of_the_users_own_is_found_by_its_path_and_keeps_every_number() -> None:
    found = metrics.compute(["accuracy", f"{__name__}:Hits"], *TWO, labels=["no", "yes"])
    assert found == {"accuracy": 3 / 5, "hits": 3.0, "misses": 2.0}


def test_all_unknown_metrics_are_named_with_the_nearest() -> None:
    with pytest.raises(UserError) as error:
        metrics.compute(["accurracy", "nowhere:Metric"], *TWO, labels=["no", "yes"])
    first, second = error.value.problems
    assert "Did you mean 'accuracy'?" in first.message
    assert "nowhere" in second.message


def test_scoring_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = "import sys, training.score, training.metrics; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
