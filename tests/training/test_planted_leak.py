"""A planted leak: ten paraphrases a customer, by whose name a model knows the label. For customers that it has not seen
it has only a hint, which is right for HINT of them.

Rows that are held out by their text, and folds of such rows, flatter the model by 1 - HINT; those of whole customers
have its accuracy on new customers within the interval.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from tests.training.data.task_types import CLASSIFICATION
from tests.training.data.test_load import rows_of
from tests.training.data.test_row_groups import Row, by_group, write
from training.data import folds
from training.data.load_rows import load
from training.evaluation.predictions import OneLabel
from training.evaluation.row_groups import Groups
from training.evaluation.scores import Score
from training.programs.score import compute_scores

CUSTOMERS, PARAPHRASES, HINT = 250, 10, 0.7
FOLDS = 5
FILLER = [f"word{number}" for number in range(40)]


def rows_of_customers(customers: int, seed: int, first: int = 0) -> list[Row]:
    """Each customer has one label, and one hint at it."""
    draw, found = random.Random(seed), list[Row]()
    for customer in range(first, first + customers):
        label = draw.choice("ab")
        hint = label if draw.random() < HINT else {"a": "b", "b": "a"}[label]
        for _ in range(PARAPHRASES):
            words = [f"customer{customer}", f"hint{hint}", *draw.sample(FILLER, 5)]
            found.append({"text": " ".join(draw.sample(words, 7)), "label": label, "customer": customer})
    return found


def train(rows: list[Row]) -> Pipeline:
    model = make_pipeline(CountVectorizer(), LogisticRegression(C=100, max_iter=300))
    return model.fit([row["text"] for row in rows], [row["label"] for row in rows])


def score(model: Pipeline, rows: list[Row], groups: Groups | None = None) -> Score:
    """The accuracy with its interval."""
    given, truth = model.predict_proba([row["text"] for row in rows]), np.array([row["label"] for row in rows])
    predicted = OneLabel(truth.astype(np.int64), given.argmax(axis=1), given, ["a", "b"])
    return compute_scores(["accuracy"], predicted, groups=groups)["accuracy"]


class Accuracies(NamedTuple):
    test: Score
    out_of_fold: Score
    new_customers: float


def measure(folder: Path, seed: int, *, in_groups: bool) -> Accuracies:
    """The accuracy on test, out of fold, and on new customers."""
    data = by_group(test_size=0.3) if in_groups else by_group(test_size=0.3, split=None)
    file = write(folder / "rows.jsonl", rows_of_customers(CUSTOMERS, seed))
    load(data, CLASSIFICATION, {"train": [file]}, folder / "data")
    trained, test = rows_of(folder / "data", "train"), rows_of(folder / "data", "test")
    model, of_fold = train(trained), folds.assign(folder / "data", ["text"], FOLDS)
    given = np.zeros((len(trained), 2))
    for fold in range(1, FOLDS + 1):
        others = train([row for row, one in zip(trained, of_fold, strict=True) if one != fold])
        mine = np.flatnonzero(of_fold == fold)
        given[mine] = others.predict_proba([trained[row]["text"] for row in mine])
    out_of_fold = OneLabel(np.array([row["label"] for row in trained]), given.argmax(axis=1), given, ["a", "b"])
    groups = {split: Groups.read(folder / "data", split) for split in ("train", "test")}
    unseen = rows_of_customers(1_000, seed + 1_000, first=CUSTOMERS)
    right = model.predict([row["text"] for row in unseen]) == ["ab".index(row["label"]) for row in unseen]
    return Accuracies(
        score(model, test, groups["test"]),
        compute_scores(["accuracy"], out_of_fold, groups=groups["train"])["accuracy"],
        float(np.mean(right)),
    )


def covers(score: Score, truth: float) -> bool:
    return (score["low"] or 0) <= truth <= (score["high"] or 0)


def test_rows_that_are_held_out_by_text_flatter_by_the_planted_amount(tmp_path: Path) -> None:
    found = measure(tmp_path, 0, in_groups=False)
    for score in (found.test, found.out_of_fold):
        assert (score["value"] or 0) - found.new_customers == pytest.approx(1 - HINT, abs=0.04)
        assert not covers(score, found.new_customers)


@pytest.mark.slow
def test_customers_that_are_held_out_whole_and_in_one_fold_show_the_truth_within_the_interval(tmp_path: Path) -> None:
    covered = []
    for seed in range(5):
        found = measure(tmp_path, seed, in_groups=True)
        assert found.new_customers == pytest.approx(HINT, abs=0.05)
        covered += [covers(found.test, HINT), covers(found.out_of_fold, HINT)]
    assert sum(covered) >= 8  # of 10; with 95 % each, fewer are one case in 90. Intervals of rows cover half of them.
