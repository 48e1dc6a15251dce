"""Rows without labels: those of evaluated splits are never among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.arrow import read_arrow, write_arrow
from tests.raised import raised_problems
from training.data.unlabelled import UnlabelledResult, load_unlabelled
from training.recipe import Data
from training.recipe.reading_rules import ReadingRules
from training.recipe.task_specification import specification

HELD = "The committee approved the proposal after a long and tiring debate."


def load(tmp_path: Path, lines: list[str], *, compares_nearly: bool = False, **data: Any) -> UnlabelledResult:
    stored = {"train": ["a known text"], "validation": [HELD, "seen once"], "test": ["  Another   HELD text "]}
    for split, texts in stored.items():
        write_arrow(tmp_path / f"data/{split}.arrow", pa.table({"text": texts, "label": [0] * len(texts)}))
    (tmp_path / "more.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "out").mkdir(exist_ok=True)
    rules = ReadingRules.of(Data(source="json", path="rows", text=["body"], label="label", **data))
    return load_unlabelled(
        specification("sequence-classification"),
        {"text": "body"},
        rules,
        [str(tmp_path / "more.jsonl")],
        tmp_path / "data",
        tmp_path / "out",
        compares_nearly=compares_nearly,
    )


def rows(*texts: Any) -> list[str]:
    return [json.dumps({"body": text}) for text in texts]


def kept(tmp_path: Path) -> list[str]:
    found: list[str] = read_arrow(tmp_path / "out/train.arrow")["text"].to_pylist()
    return found


def test_rows_of_other_splits_and_rows_that_repeat_are_left_out(tmp_path: Path) -> None:
    given = rows("new one", "SEEN  once", "another held text", "A known text", "new two", "New One", "", None)
    found = load(tmp_path, given)
    assert kept(tmp_path) == ["new one", "new two"]
    assert (found.rows, found.evaluated, found.repeated, found.unusable, found.near) == (2, 2, 2, 2, 0)


def test_rows_that_are_nearly_those_of_an_evaluated_split_are_left_out_if_the_check_is_on(tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    given = rows("new one", HELD.replace("tiring", "boring"))
    assert load(tmp_path, given).rows == 2
    assert load(tmp_path, given, compares_nearly=True).near == 1 and kept(tmp_path) == ["new one"]


def test_the_filter_and_the_names_of_the_recipes_rows_hold(tmp_path: Path) -> None:
    given = ['{"body": "one", "stars": 5}', '{"body": "two", "stars": 1}']
    assert load(tmp_path, given, filter="stars > 2").rows == 1 and kept(tmp_path) == ["one"]


def test_a_file_of_which_no_row_is_left_is_refused(tmp_path: Path) -> None:
    (problem,) = raised_problems(load, tmp_path, rows("seen once", "a known text"))
    assert problem.where == "data.unlabelled" and "1 are those of validation or test, 1 are there" in problem.message
