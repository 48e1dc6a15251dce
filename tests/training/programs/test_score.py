"""Scores from stored predictions."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.arrow import write_arrow
from tests.training import tiny
from tests.training.programs_here import SCORE, folders, run, warnings_of
from training.evaluation import bootstrap
from training.evaluation.metrics import LabelMetric
from training.evaluation.predictions import OneLabel
from training.evaluation.rankings import rank_candidates
from training.evaluation.row_groups import Groups
from training.jobs.protocol import read_events
from training.programs import score

TEXTS = ["good", "bad", 'a "quoted", split\nline', "fine"]
LOGITS = np.array([[0, 2], [3, 0], [0, 5], [1, 0]], dtype=np.float32)
TRUE = np.array([1, 0, 0, 1])
TOKENS = np.array([3, 3, 9, 3], dtype=np.int32)


class Blind(LabelMetric):
    """Never has a value."""

    def _compute(self, predictions: object, references: object) -> dict[str, float]:
        return {"blind": math.nan}


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """The output folder and the figures for four rows, two of them right."""
    home = tmp_path_factory.mktemp("score")
    (home / "predictions").mkdir()
    tiny.write_predictions(home / "predictions/validation.parquet", TRUE, LOGITS, TOKENS)
    write_arrow(home / "data/validation.arrow", pa.table({"text": TEXTS, "label": TRUE}))
    metrics = ["accuracy", "recall", "roc_auc", f"{__name__}:Blind"]
    (home / "data/labels.json").write_text('["neg", "pos"]')
    write_arrow(home / "data/train.arrow", pa.table({"label": [1, 1, 0]}))
    inputs, settings = folders(home, "predictions", "data", "tokens", "model"), {"metrics": metrics, **SCORE}
    task = "sequence-classification"
    return home / "job/output", run(score, home / "job", inputs, task=task, splits=["validation"], **settings)


def test_each_metric_has_an_interval_and_what_has_no_value_is_null_and_warned_of(
    scored: tuple[Path, dict[str, float]],
) -> None:
    output, figures = scored
    written = json.loads((output / "metrics.json").read_text())["validation"]
    assert list(written) == ["accuracy", "recall", "roc_auc", "blind"]
    # of 4 rows each right with probability 1/2, all or none are in 1 draw of 16
    assert written["accuracy"] == {"value": 0.5, "low": 0.0, "high": 1.0, "baseline": 0.5}
    assert written["blind"] == dict.fromkeys(("value", "low", "high", "baseline"))
    assert (written["recall"]["baseline"], written["roc_auc"]["baseline"]) == (1.0, 0.5)
    assert figures == {"validation": written}
    events, _ = read_events(output.parent / "events.jsonl", 0)
    assert [warning.split(":")[0] for warning in warnings_of(output.parent)] == ["blind has no value on validation"]
    assert any(event.get("done") == event.get("total") == 1000 for event in events)


def test_intervals_of_rows_in_groups_are_those_of_so_many_groups_in_slices_too(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    groups = np.arange(400) // 10
    right = np.where(random.random(40) < 0.7, 1, 0)[groups]
    predicted = OneLabel(np.ones(400, np.int64), right, np.full((400, 2), 0.5), ["a", "b"])
    ends = {}
    for name, of_rows in (("rows", None), ("groups", Groups(groups))):
        found = score.compute_scores(["accuracy"], predicted, groups=of_rows)["accuracy"]
        assert found["value"] == right.mean()
        ends[name] = (found["high"] or 0) - (found["low"] or 0)
        slices = {"first": np.arange(200), "one group": np.arange(10)}
        parts = score.score_groups(
            slices, ["first", "one group"], predicted, {"accuracy": found}, ["accuracy"], _none, of_rows
        )
        first, one = (part["metrics"]["accuracy"] for part in parts)
        ends[f"{name} of a slice"] = (first["high"] or 0) - (first["low"] or 0)
        assert (one["low"] is None) == (of_rows is not None)
    assert ends["groups"] == pytest.approx(np.sqrt(10) * ends["rows"], rel=0.2)
    assert ends["groups of a slice"] == pytest.approx(np.sqrt(10) * ends["rows of a slice"], rel=0.25)


def _none(done: int, total: int) -> None:
    """Reports nothing."""


def test_intervals_hold_the_true_value_as_often_as_they_say_and_are_the_same_every_time() -> None:
    draw = np.random.default_rng(5)
    held = 0
    for _ in range(60):
        right = draw.random(150) < 0.8
        rows = OneLabel(np.ones(150, int), right.astype(int), np.eye(2)[right.astype(int)], ["no", "yes"])
        found = score.compute_scores(["accuracy"], rows)["accuracy"]
        held += found["low"] <= 0.8 <= found["high"]  # type: ignore[operator]
    assert 53 <= held <= 60 and score.compute_scores(["accuracy"], rows)["accuracy"] == found


def test_queries_that_all_lack_a_relevant_document_have_no_figures() -> None:
    no_label, queries = np.zeros(4), np.array([0, 0, 1, 1])
    rankings = rank_candidates(queries, np.arange(4.0), no_label, queries)
    assert score.compute_scores(["ndcg_at_10"], rankings) == {"ndcg_at_10": {"value": None, "low": None, "high": None}}


def test_draws_are_the_same_however_many_fit_into_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = bootstrap.draws(7, 10, seed=1)
    assert (whole.sum(axis=1) == 7).all() and len(np.unique(whole, axis=0)) > 1
    monkeypatch.setattr(bootstrap, "MAX_COUNTS", 25)
    cut = list(bootstrap.draws(7, 10, seed=1))
    assert [len(part) for part in cut] == [3, 3, 3, 1]
    np.testing.assert_array_equal(np.concatenate(cut), whole)


def test_sample_has_the_worst_rows_first_with_text_and_probability(
    scored: tuple[Path, dict[str, float]],
) -> None:
    with open(scored[0] / "log/predictions_sample.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == ["2", "3", "0", "1"]
    assert [row["text"] for row in rows] == [TEXTS[2], TEXTS[3], TEXTS[0], TEXTS[1]]
    assert (rows[0]["label"], rows[0]["prediction"]) == ("neg", "pos")
    assert float(rows[0]["probability"]) == pytest.approx(1 / (1 + np.exp(-5)), abs=1e-4)


def test_calibration_confusion_and_precision_recall_are_drawn(scored: tuple[Path, dict[str, float]]) -> None:
    drawn = {file.name: file.read_bytes()[:4] for file in (scored[0] / "log").glob("*.png")}
    names = ("calibration", "confusion", "precision_recall")
    assert drawn == {f"{name}_validation.png": b"\x89PNG" for name in names}


def test_drawing_needs_no_display_and_leaves_the_users_backend_alone() -> None:
    assert "matplotlib.pyplot" not in sys.modules
