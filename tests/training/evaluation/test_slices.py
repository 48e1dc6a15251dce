"""The rows of a split in groups, and the figures of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.arrow import write_arrow, write_kept
from tests.training import tiny
from tests.training.programs_here import folders, run
from training.evaluation import slices
from training.evaluation.metrics import LabelMetric, make
from training.evaluation.predictions import OneLabel
from training.jobs.protocol import read_events
from training.programs import score
from training.task_types import load

ROWS = 60
TRUE = np.arange(ROWS) % 2
GENRES = [None if row < 2 else "none" if row == 2 else "war/é" if row < 20 else "horror" for row in range(ROWS)]
THIRDS = ["abcde"[row // 11] if row < 55 else f"{row}" for row in range(ROWS)]
TOKENS = np.repeat([3, 7, 12], 20).astype(np.int32)
METRICS = load("sequence-classification").metrics


class Fussy(LabelMetric):
    """The share of rows that are right, of 20 rows or more."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        if len(references) < 20:
            raise ValueError("too few")
        return {"fussy": float((predictions == references).mean())}


def test_lengths_are_cut_into_quarters_of_the_rows_and_equal_ends_make_one_group() -> None:
    found = slices.of_length(np.array([5, 1, 2, 3, 4, 6, 7, 8], np.int32))
    assert {name: rows.tolist() for name, rows in found.items()} == {
        "1-2 tokens": [1, 2],
        "3-4 tokens": [3, 4],
        "5-6 tokens": [0, 5],
        "7-8 tokens": [6, 7],
    }
    assert {name: len(rows) for name, rows in slices.of_length(TOKENS).items()} == {
        "3 tokens": 20,
        "4-7 tokens": 20,
        "8-12 tokens": 20,
    }
    assert list(slices.of_length(np.ones(5, np.int32))) == ["1 token"]


def test_no_rows_have_no_groups(tmp_path: Path) -> None:
    write_kept(tmp_path, "test", {"genre": []})
    assert slices.of_column(tmp_path / "test.slices.arrow", "genre") == {}
    assert slices.of_label(np.zeros(0, np.int64), ["a", "b"]) == slices.of_length(np.zeros(0, np.int32)) == {}


def test_a_column_is_cut_by_its_values_with_most_rows_first_and_null_is_none(tmp_path: Path) -> None:
    write_kept(tmp_path, "test", {"genre": GENRES})
    found = slices.of_column(tmp_path / "test.slices.arrow", "genre")
    assert {name: rows.tolist() for name, rows in found.items()} == {
        "horror": [*range(20, 60)],
        "war/é": [*range(3, 20)],
        "none": [0, 1, 2],
    }


def test_a_column_written_in_blocks_with_other_dictionaries_is_read_whole(tmp_path: Path) -> None:
    first, second = (pa.array(values).dictionary_encode() for values in (["a", "b"], ["b", "c", None]))
    schema = pa.schema({"genre": first.type})
    with pa.ipc.new_stream(str(tmp_path / "stream"), schema) as writer:
        for block in (first, second):
            writer.write_batch(pa.record_batch({"genre": block}, schema=schema))
    table = pa.ipc.open_stream(str(tmp_path / "stream")).read_all()
    assert table["genre"].num_chunks == 2
    with pa.ipc.new_file(str(tmp_path / "file"), schema) as writer:
        writer.write_table(table.unify_dictionaries())
    found = slices.of_column(tmp_path / "file", "genre")
    assert {name: rows.tolist() for name, rows in found.items()} == {"b": [1, 2], "a": [0], "c": [3], "none": [4]}


def test_the_groups_of_most_rows_are_shown_and_those_that_are_named() -> None:
    groups = {name: np.arange(rows) for name, rows in (("a", 3), ("b", 1), ("c", 9), ("d", 2))}
    assert list(slices.largest(groups, 2, [])) == ["a", "c"]
    assert list(slices.largest(groups, 2, ["b", "elsewhere"])) == ["a", "b", "c"]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the job, done."""
    home = tmp_path_factory.mktemp("slices")
    (home / "predictions").mkdir()
    given = np.where(np.arange(ROWS) < 40, TRUE, 1 - TRUE)  # the last third is wrong
    logits = np.eye(2, dtype=np.float32)[given] * 3
    tiny.write_predictions(home / "predictions/test.parquet", TRUE, logits, TOKENS, given)
    table = pa.table({"text": [f"text {row}" for row in range(ROWS)], "label": TRUE})
    write_arrow(home / "data/test.arrow", table)
    write_kept(home / "data", "test", {"genre": GENRES, "$k\\/": [f"{row}" for row in range(ROWS)], "third": THIRDS})
    settings: dict[str, Any] = {"metrics": ["accuracy", "roc_auc", f"{__name__}:Fussy"], "splits": ["test"]}
    settings |= {"slices": ["genre", "label", "length_bucket", "elsewhere", "$k\\/", "third"], "each": ["third"]}
    settings |= {"named": {"$k\\/": ["59"]}, "fewest_rows": 10, "most_groups": 4}
    write_arrow(home / "data/train.arrow", table)
    (home / "data/labels.json").write_text('["neg", "pos"]')
    inputs = folders(home, "predictions", "data", "tokens", "model")
    run(score, home / "job", inputs, task="sequence-classification", **settings)
    return home / "job"


def groups(job: Path, name: str) -> dict[str, dict[str, Any]]:
    written = json.loads((job / "output/slices.json").read_text(encoding="utf-8"))
    return {group.pop("group"): group for group in written["test"][name]}


@pytest.mark.slow
def test_each_group_has_its_rows_and_the_figures_that_the_whole_split_has(scored: Path) -> None:
    genres = groups(scored, "genre")
    assert {name: group["rows"] for name, group in genres.items()} == {"horror": 40, "war/é": 17, "none": 3}
    whole = json.loads((scored / "output/metrics.json").read_text())["test"]
    assert all(list(group["metrics"]) == list(whole) == ["accuracy", "roc_auc", "fussy"] for group in genres.values())
    horror = genres["horror"]["metrics"]["accuracy"]
    assert horror["value"] == 0.5 and 0.3 < horror["low"] < 0.5 < horror["high"] < 0.7
    assert {name: group["metrics"]["accuracy"]["value"] for name, group in groups(scored, "length_bucket").items()} == {
        "3 tokens": 1.0,
        "4-7 tokens": 1.0,
        "8-12 tokens": 0.0,
    }


def test_few_rows_and_own_metrics_have_no_interval_and_what_has_no_value_on_a_group_is_null(scored: Path) -> None:
    few = groups(scored, "genre")["none"]["metrics"]
    assert few["accuracy"] == {"value": 1.0, "low": None, "high": None}
    nothing = {"value": None, "low": None, "high": None}
    assert few["fussy"] == nothing  # which refuses so few rows
    assert groups(scored, "genre")["horror"]["metrics"]["fussy"] == {"value": 0.5, "low": None, "high": None}
    assert groups(scored, "label")["pos"]["metrics"]["roc_auc"] == nothing  # of one label alone


def test_the_figures_of_a_group_are_those_of_its_rows_alone() -> None:
    draw = np.random.default_rng(3)
    rows = OneLabel(draw.integers(0, 3, 90), draw.integers(0, 3, 90), draw.dirichlet(np.ones(3), 90), ["1", "2", "4"])
    for part in (rows.take(np.arange(20, 50)), rows.take(np.flatnonzero(rows.references == 1))):
        with np.errstate(all="raise"):
            found = score.score_group(make(METRICS, part), part, True)
        assert found == score.compute_scores(METRICS, part) and list(found) == [*METRICS]


def test_groups_beyond_the_largest_are_reported_and_progress_reaches_its_end(scored: Path) -> None:
    assert list(groups(scored, "$k\\/")) == ["0", "1", "10", "11", "59"]
    events, _ = read_events(scored / "events.jsonl", 0)
    (warning,) = [event["message"] for event in events if event["kind"] == "warning" and "$k" in event["message"]]
    assert "test has no column 'elsewhere', so no groups of it." in [event.get("message") for event in events]
    assert warning == "$k\\/ has 60 groups in test: only the largest and those that floors name have figures, 5 in all."
    assert [event["message"] for event in events if event.get("message", "").startswith("third")] == [
        "third has 10 groups in test: only the largest and those that floors name have intervals, 4 in all."
    ]
    done = [(event["done"], event["total"]) for event in events if event.get("phase") == "slices"]
    assert done.count((5000, 5000)) == 1 and all(some <= total for some, total in done)


def test_where_each_group_has_a_floor_all_have_figures_and_the_largest_alone_have_intervals(scored: Path) -> None:
    thirds = groups(scored, "third")
    assert list(thirds) == [*"abcde", "55", "56", "57", "58", "59"]
    found = {name: group["metrics"]["accuracy"] for name, group in thirds.items()}
    assert [score["value"] for score in found.values()] == [1.0, 1.0, 1.0, 7 / 11, *(6 * [0.0])]
    assert [name for name, score in found.items() if score["low"] is not None] == [*"abcd"]


def test_each_slice_is_drawn_in_a_file_whose_name_is_safe(scored: Path) -> None:
    written = {file.name: file.read_bytes() for file in (scored / "output/log").glob("slices_*")}
    drawn = {name: content[:4] for name, content in written.items()}
    assert drawn == dict.fromkeys(
        (f"slices_test_{name}.png" for name in ("genre", "label", "length_bucket", "third", "_k__3223aa74")), b"\x89PNG"
    )
    heights = {name: int.from_bytes(content[20:24], "big") for name, content in written.items()}
    # of 10 groups with figures the 4 largest, and of 60 those and one that a floor names
    assert heights["slices_test_third.png"] < heights["slices_test__k__3223aa74.png"]
