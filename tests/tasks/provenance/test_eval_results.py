"""Evaluation results for the Hub: only those that are comparable with other models' on the same dataset."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import EvalResultEntry, parse_eval_result_entries

from tasks.cache.results import Lock, PinnedCommit
from tasks.provenance.eval_results import build_eval_results
from tests.made import LABELS, ROWS, artifact
from training.recipe import parse

ON_HUB = Lock(data_hub=PinnedCommit(name="stanfordnlp/imdb@main", commit="d" * 40))
METRICS = ["accuracy", "log_loss", "mae"]
WHOLE = {"held_out": {}, "left_out": {"test": 0}, "filtered": {"test": 0}}


def build(
    lock: Lock = ON_HUB, report: dict[str, Any] = WHOLE, value: float = 0.8, metric: str = "accuracy", **data: Any
) -> EvalResultEntry | None:
    """The result of a model that is judged by a metric whose value is `value`, as the Hub's client reads it."""
    recipe = parse(
        {
            "name": "reviews",
            "task": "sequence-classification",
            "data": {"source": "hub", "path": "stanfordnlp/imdb", "text": ["text"], "label": "label", **data},
            "model": {"source": "hub", "path": "me/base"},
            "evaluation": {"splits": ["validation", "test"], "metrics": METRICS},
            "release": {"gate": {"compare": metric}},
        }
    )
    rows = artifact("load_data", {"labels.json": LABELS, "log/report.json": json.dumps(report).encode()}, ROWS)
    interval = {"low": 0.7, "high": 0.9}
    scores = {split: {name: {"value": value, **interval} for name in METRICS} for split in ("test", "train")}
    text = build_eval_results(recipe, lock, rows, artifact("score", {"metrics.json": b"{}"}, scores))
    if text is None:
        return None
    (entry,) = parse_eval_result_entries(yaml.safe_load(text))
    return entry


def test_the_hubs_client_reads_the_judged_metric_with_its_dataset_commit_and_interval(home: Path) -> None:
    assert build(config="plain_text") == EvalResultEntry(
        dataset_id="stanfordnlp/imdb",
        task_id="plain_text",
        value=0.8,
        dataset_revision="d" * 40,
        notes="accuracy on test, 95 % interval 0.7000 to 0.9000",
    )


@pytest.mark.parametrize("reason", ["held_out", "left_out", "filtered"])
def test_a_split_that_is_not_whole_gives_no_result(home: Path, reason: str) -> None:
    assert build(report=WHOLE | {reason: {"test": 3}}) is None
    assert build(report=WHOLE | {reason: {"validation": 3}}) is not None


def test_rows_from_elsewhere_the_first_rows_of_a_split_and_undefined_values_give_no_result(home: Path) -> None:
    assert build(lock=Lock()) is None
    assert build(limit=100) is None
    assert build(value=math.nan) is None


def test_a_split_has_its_name_on_the_hub_and_one_that_is_trained_on_gives_no_result(home: Path) -> None:
    named = build(splits={"train": "train", "validation": "extra", "test": "validation"})
    assert named is not None and named.notes is not None and named.notes.startswith("accuracy on validation,")
    assert build(splits={"train": "test", "validation": "extra", "test": "test"}) is None


@pytest.mark.parametrize("metric", ["log_loss", "mae"])
def test_a_metric_for_which_lower_is_better_gives_no_result_because_leaderboards_list_the_highest_values_first(
    home: Path, metric: str
) -> None:
    assert build(metric=metric) is None
