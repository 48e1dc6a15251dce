"""Comparison of a model with the champion on the same rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from scipy.stats import binomtest

from tasks.cache.results import Comparison
from tests.arrow import write_arrow
from tests.raised import raised_problems
from tests.training import programs_here, tiny
from tests.training.programs_here import COMPARE, folders
from training.evaluation.constant_predictions import Constant, Rival
from training.evaluation.metrics.resampling import cost
from training.evaluation.predictions import Numbers, OneLabel
from training.jobs.protocol import read_events
from training.programs import compare
from training.programs.compare import CompareSettings, bound_flips

LABELS = ["neg", "pos"]
ROWS = 40
TRUE = np.arange(ROWS) % 2
TOKENS = np.full(ROWS, 4, dtype=np.int32)


def logits_of(wrong: list[int], sure: float = 2.0) -> npt.NDArray[np.float32]:
    """Of a model that is right but on these rows, and surest on the last ones."""
    predicted = np.where(np.isin(np.arange(ROWS), wrong), 1 - TRUE, TRUE)
    logits = np.zeros((ROWS, 2), dtype=np.float32)
    logits[np.arange(ROWS), predicted] = sure * (1 + np.arange(ROWS) / ROWS)
    return logits


def run(
    home: Path,
    new: npt.NDArray[np.float32],
    old: npt.NDArray[np.float32],
    groups: npt.NDArray[np.int64] | None = None,
    **say: Any,
) -> tuple[Comparison, list[dict[str, str]]]:
    """The result of the program, and the rows that it shows."""
    for folder, logits in (("predictions", new), ("champion", old)):
        (home / folder).mkdir(parents=True)
        tiny.write_predictions(home / folder / "test.parquet", TRUE, logits, TOKENS)
    rows = {"text": [f"text {row}" for row in range(ROWS)], "label": TRUE}
    write_arrow(home / "data/test.arrow", pa.table(rows))
    if groups is not None:
        write_arrow(home / "data/test.groups.arrow", pa.table({"group": groups}))
    (home / "data/labels.json").write_text(json.dumps(LABELS))
    inputs = folders(home, "predictions", "champion", "data")
    figures = programs_here.run(compare, home / "job", inputs, task="sequence-classification", **COMPARE | say)
    assert json.loads((home / "job/output/comparison.json").read_text()) == figures
    with open(home / "job/output/log/disagreements.csv", newline="", encoding="utf-8") as file:
        return Comparison.model_validate(figures), list(csv.DictReader(file))


def test_accuracy_is_compared_exactly_and_the_rows_that_differ_are_shown_plainest_first(tmp_path: Path) -> None:
    found, rows = run(tmp_path, logits_of([1, 7]), logits_of([1, 2, 3, 4, 5, 6, 9, 11]))
    assert (found.method, found.rows, found.gained, found.lost) == ("mcnemar", ROWS, 7, 1)
    assert (found.value, found.champion_value) == (38 / 40, 32 / 40) and found.gain == pytest.approx(6 / 40)
    assert found.better and found.p_value == pytest.approx(9 / 256)
    assert [(row["change"], row["row"]) for row in rows] == [
        ("lost", "7"),
        *(("gained", str(row)) for row in (11, 9, 6, 5, 4, 3, 2)),
    ]
    lost = rows[0]
    assert (lost["text"], lost["label"], lost["prediction"], lost["champion"]) == ("text 7", "pos", "neg", "pos")
    assert float(lost["probability_of_label"]) < 0.5 < float(lost["champion_probability_of_label"])


def test_other_metrics_and_margins_are_compared_by_permutation_and_a_margin_below_zero_by_the_bootstrap(
    tmp_path: Path,
) -> None:
    new, old = logits_of([1]), logits_of([1, 2, 3, 4, 5, 6, 9, 11])
    found, _ = run(tmp_path / "margin", new, old, margin=0.01)
    assert found.method == "permutation" and found.better and found.gain == pytest.approx(7 / 40)
    assert found.at_least > 0.01
    found, _ = run(tmp_path / "worse", new, old, margin=-0.05)
    assert found.method == "bootstrap" and found.better
    found, _ = run(tmp_path / "f1", new, old, metrics=["f1"], figure="f1")
    assert (found.method, found.metric) == ("permutation", "f1") and found.better
    done = [event["done"] for event in read_events(tmp_path / "f1/job/events.jsonl", 0)[0]]
    assert len(done) > 1 and done == sorted(done) and done[-1] == 2000


def test_rows_in_groups_count_as_their_groups_do(tmp_path: Path) -> None:
    """The new model alone has 16 rows right, all of two groups: as much as two heads of two coins."""
    new, old = logits_of([]), logits_of([*range(8), *range(20, 28)])
    found, _ = run(tmp_path / "rows", new, old, max_flips=0.2)
    assert found.better and (found.groups, found.design_effect) == (None, None)
    assert found.flips and found.flips.few_enough and found.flips.needs == 14
    groups = np.arange(ROWS) // 4
    grouped, _ = run(tmp_path / "groups", new, old, groups, max_flips=0.2)
    assert (grouped.method, grouped.groups, grouped.gained, grouped.better) == ("gaffke", 10, 16, False)
    assert grouped.p_value == pytest.approx(1 / 16) and grouped.design_effect == pytest.approx(4)
    assert grouped.flips and not grouped.flips.few_enough and grouped.flips.needs == 14
    assert grouped.flips.at_most == pytest.approx(1 - 0.05 ** (1 / 10))  # none of 10 groups
    by_f1, _ = run(tmp_path / "f1", new, old, groups, metrics=["f1"], figure="f1")
    alone, _ = run(tmp_path / "f1 of rows", new, old, metrics=["f1"], figure="f1")
    assert by_f1.method == "permutation" and alone.better and not by_f1.better and by_f1.groups == 10


def test_rows_that_decide_alone_are_warned_of(tmp_path: Path) -> None:
    new, old = logits_of([], sure=3.0), logits_of([], sure=2.5)
    new[7] = [20, -20]  # the true label is 1
    settings = {"metrics": ["log_loss"], "figure": "log_loss"}
    found, _ = run(tmp_path / "one", new, old, **settings)
    (warning,) = found.warnings
    assert warning.startswith("1 of 40 rows make up 97% of the variance of the difference in log_loss (row 7)")
    assert not found.better
    found, _ = run(tmp_path / "none", logits_of([], sure=3.0), logits_of([], sure=0.5), **settings)
    assert found.warnings == []


def test_of_log_loss_less_is_better(tmp_path: Path) -> None:
    sure, unsure = logits_of([1], sure=1.0), logits_of([1], sure=0.1)
    settings = {"metrics": ["log_loss"], "figure": "log_loss"}
    found, rows = run(tmp_path, sure, unsure, **settings)
    assert found.value < found.champion_value and found.gain == pytest.approx(found.champion_value - found.value)
    assert found.better and rows == []


def test_a_constant_model_that_beats_the_baseline_by_chance_is_no_evidence() -> None:
    truth = (np.arange(ROWS) < 35).astype(np.int64)
    new, old = (OneLabel(truth, np.full(ROWS, label), np.full((ROWS, 2), 0.5), LABELS) for label in (1, 0))
    settings = CompareSettings(task="sequence-classification", **COMPARE)
    assert compare.compare_models(new, old, settings).better
    found = compare.compare_models(new, old, settings, Constant("'neg'", lambda rows, split: old))
    assert (found.better, found.p_value, found.at_least) == (False, 1.0, 0.0)
    assert found.is_constant and found.champion == "the constant answer 'neg'"
    method = compare.compare_models(new, old, settings, Rival("BM25", lambda rows, split: old))
    assert method.baseline and not method.is_constant and method.champion == "BM25"


def test_slow_figures_cost_more_permutations() -> None:
    def with_labels(names: str) -> OneLabel:
        return OneLabel(TRUE, TRUE, np.full((ROWS, len(names)), 1 / len(names)), list(names))

    assert [cost("roc_auc", with_labels(names)) for names in ("ab", "abcd")] == [1, 4]
    assert cost("f1", with_labels("abcd")) == 1 and cost("spearman", with_labels("ab")) == 10


def test_flips_are_counted_bounded_and_listed_worst_first(tmp_path: Path) -> None:
    new, old = logits_of([1, 7, 9]), logits_of([1, 2, 3, 4, 5, 6, 11, 12, 13])
    found, _ = run(tmp_path / "accuracy", new, old, max_flips=0.15)
    assert found.flips and (found.flips.rows, found.flips.share) == (2, 2 / 40)
    assert found.flips.at_most == pytest.approx(binomtest(2, 40).proportion_ci(0.9, "exact").high)  # one-sided at 95 %
    assert found.flips.few_enough and not found.flips.model_copy(update={"max_share": 0.1}).few_enough
    assert [(row.row, row.text, row.label, row.prediction) for row in found.flips.worst] == [
        (9, "'text 9'", "'pos'", "'neg'"),
        (7, "'text 7'", "'pos'", "'neg'"),
    ]
    found, _ = run(tmp_path / "f1", new, old, max_flips=0.15, metrics=["f1"], figure="f1")
    assert found.flips and found.flips.rows == 2
    found, _ = run(tmp_path / "any", new, old)
    assert found.flips is None


def test_flips_of_predictions_that_are_neither_right_nor_wrong_are_refused() -> None:
    settings = CompareSettings(task="regression", **COMPARE | {"max_flips": 0.1})
    scores = Numbers(np.zeros(3), np.zeros(3))
    (problem,) = raised_problems(bound_flips, scores, scores, settings)
    assert problem.where == "release.gate.flips" and "neither right nor wrong" in problem.message


def test_models_that_predict_alike_show_no_rows(tmp_path: Path) -> None:
    found, rows = run(tmp_path, logits_of([1]), logits_of([1]))
    assert not found.better and found.p_value == 1 and rows == []
