"""Folds: each training row is in one, with its equals and its group, and stays there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION
from tests.training.data.test_load import rows_of
from tests.training.data.test_row_groups import Row, by_group, rows_of_customers, write
from training.data import folds
from training.data.ipc_files import groups_file
from training.data.load_rows import load
from training.problems import Problem
from training.recipe import Data

ANY_SPLIT = {"source": "json", "path": "-", "text": ["text"], "label": "label"}


def fold_of_texts(folder: Path, data: Data, rows: list[Row], number: int) -> dict[str, int]:
    """The fold of each text of train."""
    load(data, CLASSIFICATION, {"train": [write(folder.with_suffix(".jsonl"), rows)]}, folder)
    found = folds.assign(folder, ["text"], number)
    texts = [row["text"] for row in rows_of(folder, "train")]
    assert len(texts) == len(found)
    by_text = dict(zip(texts, found.tolist(), strict=True))
    assert [by_text[text] for text in texts] == found.tolist(), "equal texts are in several folds"
    return by_text


@pytest.mark.parametrize("data", [Data.model_validate(ANY_SPLIT), by_group()], ids=["rows", "groups"])
def test_every_row_has_one_fold_and_keeps_it_while_rows_arrive(tmp_path: Path, data: Data) -> None:
    old, new = rows_of_customers(60, 6, seed=1), rows_of_customers(90, 3, seed=2)
    arrived = [*old, *new, *old[:20]]
    random.Random(0).shuffle(arrived)
    before = fold_of_texts(tmp_path / "before", data, old, 4)
    after = fold_of_texts(tmp_path / "after", data, arrived, 4)
    assert {*before.values()} == {1, 2, 3, 4} and before.items() <= after.items()


def test_a_group_is_in_one_fold(tmp_path: Path) -> None:
    rows = [*rows_of_customers(60, 6), {"text": "nobody writes", "label": "a"}]
    found = fold_of_texts(tmp_path / "rows", by_group(), rows, 5)
    by_customer: dict[str, set[int]] = {}
    for text, fold in found.items():
        by_customer.setdefault(text.split()[1], set()).add(fold)
    assert all(len(of_customer) == 1 for of_customer in by_customer.values())
    assert {fold for of_customer in by_customer.values() for fold in of_customer} == {1, 2, 3, 4, 5}


def test_groups_stay_beside_their_rows_where_rows_are_left_out(tmp_path: Path) -> None:
    train = rows_of_customers(40, 2)
    for number in (0, 7, 30):
        train[number]["label"] = "unseen in label_names"
    names = ["a", "b"]
    data = by_group(label_names=names, checks={"unknown_label": "warning"}, test_size=0.0)
    files = {"train": [write(tmp_path / "t.jsonl", train)], "validation": [write(tmp_path / "v.jsonl", train[1:3])]}
    load(data, CLASSIFICATION, files, tmp_path / "rows")
    of_customer: dict[str, set[int]] = {}
    groups = read_arrow(tmp_path / "rows" / groups_file("train"))["group"].to_pylist()
    for row, group in zip(rows_of(tmp_path / "rows", "train"), groups, strict=True):
        of_customer.setdefault(row["text"].split()[1], set()).add(group)
    assert len(groups) == 77 and all(len(found) == 1 for found in of_customer.values())
    assert len(set.union(*of_customer.values())) == len(of_customer)


def test_a_fold_without_rows_is_refused_with_the_number_that_has_none(tmp_path: Path) -> None:
    rows = rows_of_customers(9, 10)
    files = {name: [write(tmp_path / f"{name}.jsonl", rows)] for name in ("train", "validation")}
    load(by_group(test_size=0.0, checks={"shared_groups": "ignore"}), CLASSIFICATION, files, tmp_path / "rows")
    (problem,) = raised_problems(folds.assign, tmp_path / "rows", ["text"], 30)
    assert isinstance(problem, Problem) and problem.where == "evaluation.folds"
    assert problem.message.startswith("30 leaves fold ")
    most = int(problem.message.rstrip(".").rpartition(" ")[2])
    assert {*folds.assign(tmp_path / "rows", ["text"], most).tolist()} == {*range(1, most + 1)}


def test_a_label_in_one_fold_alone_is_named(tmp_path: Path) -> None:
    rows = [*rows_of_customers(30, 4), {"text": "the one row", "label": "c"}]
    files = {name: [write(tmp_path / f"{name}.jsonl", rows)] for name in ("train", "validation")}
    load(Data.model_validate(ANY_SPLIT), CLASSIFICATION, files, tmp_path / "rows")
    found = folds.assign(tmp_path / "rows", ["text"], 3)
    sentences = [*folds.find_lone_labels(tmp_path / "rows", found, ["a", "b", "c"])]
    assert len(sentences) == 1 and sentences[0].startswith("all rows of label 'c' are in fold ")
