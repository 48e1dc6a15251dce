"""Columns that look like a group or a time are pointed out if rows are held out by chance, and no others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION
from tests.training.data.test_load import report_of
from training.data import split_signs
from training.data.load_rows import load
from training.problems import Problem
from training.recipe import Data

Row = dict[str, Any]


def day(number: int) -> str:
    return (date(2026, 1, 1) + timedelta(days=number)).isoformat()


def signs(folder: Path, rows: list[Row], source: str = "json", **data: Any) -> dict[str, Problem]:
    """The problems of the two checks."""
    folder.mkdir(exist_ok=True)
    file = folder / f"rows.{source}"
    if source == "csv":
        file.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"source": source, "path": "-", "text": ["text"], "label": "label", **data}
    load(Data.model_validate(fields), CLASSIFICATION, {"train": [str(file)]}, folder / "out")
    problems = [Problem(**one) for one in report_of(folder / "out")["problems"]]
    return {one.check or "": one for one in problems if one.check in ("group_like", "time_like")}


def of_customers(draw: random.Random, customers: int = 150, each: int = 6) -> list[Row]:
    """Rows whose label is the customer's."""
    rows = [
        {"text": f"{draw.random()} text {draw.random()}", "label": label, "customer": f"c{customer}", "stars": 3}
        for customer in range(customers)
        for label in [draw.choice("ab")]
        for _ in range(each)
    ]
    draw.shuffle(rows)
    return rows


@pytest.mark.parametrize("source", ["json", "csv"])
def test_a_column_whose_rows_share_their_labels_looks_like_a_group(tmp_path: Path, source: str) -> None:
    problem = signs(tmp_path, of_customers(random.Random(1)), source)["group_like"]
    assert (problem.where, problem.level) == ("data.split", "warning")
    assert problem.message.startswith("column 'customer' looks like a group: ")
    assert "the label of such a row is right for 100% of them, and that of any row for 5" in problem.message
    assert "set data.split: {by: group, column: customer}; if not, data.checks.group_like: ignore." in problem.message


def test_a_column_with_more_values_than_a_slice_may_have_is_looked_at_too(tmp_path: Path) -> None:
    assert "group_like" in signs(tmp_path, of_customers(random.Random(2), customers=6000, each=4))


def test_a_column_whose_rows_share_their_words_looks_like_a_group(tmp_path: Path) -> None:
    draw = random.Random(3)
    vocabulary = [f"w{n}" for n in range(500)]
    rows = []
    for document in range(150):
        own = draw.sample(vocabulary, 12)
        rows += [
            {"text": " ".join(draw.sample(own, 8)), "label": draw.choice("ab"), "page": document} for _ in range(5)
        ]
    message = signs(tmp_path, rows)["group_like"].message
    assert "column 'page' looks like a group" in message and "of their words with it, and with any row" in message


def test_nothing_is_said_once_rows_are_split_by_the_group(tmp_path: Path) -> None:
    rows = of_customers(random.Random(4))
    assert signs(tmp_path, rows, split={"by": "group", "column": "customer"}) == {}


@pytest.mark.parametrize(
    "value",
    [
        lambda n, row, draw: draw.randrange(300),  # in no relation to the rows
        lambda n, row, draw: n,  # each row its own
        lambda n, row, draw: f"{row['label']}{draw.randrange(4)}",  # a category
        lambda n, row, draw: n // 7,  # pages of a list
        lambda n, row, draw: day(draw.randrange(300)),
        lambda n, row, draw: day(n // 10),  # rows in the order of time, whose labels stay as they are
        lambda n, row, draw: draw.choice([None, 1, 2]),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_other_columns_do_not(tmp_path: Path, value: Callable[..., Any], seed: int) -> None:
    draw = random.Random(seed)
    rows = [{"text": f"{draw.random()} row", "label": draw.choice("ab")} for n in range(2000)]
    assert signs(tmp_path, [{**row, "other": value(n, row, draw)} for n, row in enumerate(rows)]) == {}


def test_labels_that_change_with_a_time_are_shown(tmp_path: Path) -> None:
    draw = random.Random(5)
    rows = [
        {
            "text": f"{draw.random()} row",
            "label": "spam" if draw.random() < 0.1 + n / 4000 else "ham",
            "sent": day(n // 10),
        }
        for n in range(2000)
    ]
    draw.shuffle(rows)
    problem = signs(tmp_path, rows)["time_like"]
    assert problem.where == "data.split" and "the labels change with the time in column 'sent': " in problem.message
    assert "set data.split: {by: time, column: sent}" in problem.message
    errors = raised_problems(signs, tmp_path, rows, checks={"time_like": "error"})
    assert [one.check for one in errors if one.level == "error"] == ["time_like"]
    assert signs(tmp_path, rows, checks={"time_like": "ignore"}) == {}
    rows[0]["sent"] = "unknown"
    assert "the labels change with the time in column 'sent': " in signs(tmp_path, rows)["time_like"].message


def test_only_the_first_rows_are_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_signs, "MOST_ROWS", 100)
    kept: list[int] = []
    groups = split_signs.SplitSigns.groups
    monkeypatch.setattr(split_signs.SplitSigns, "groups", lambda self: kept.append(self._rows) or groups(self))
    signs(tmp_path, of_customers(random.Random(6), customers=5000))
    assert kept == [10_000]  # one block
