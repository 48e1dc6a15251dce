"""Labels that are probably wrong, of each task type, in a file that people decide in."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.arrow import write_arrow
from tests.raised import raised_problems
from tests.training.programs_here import folders, run
from training.data.corrections import COLUMNS, row_names
from training.data.duplicates import hash_texts
from training.programs import list_labels
from training.task_types.multi_label_classification import THRESHOLDS

NAMES = ["neg", "pos"]


def name_of(text: str) -> str:
    return row_names(hash_texts([text]))[0]


def write(home: Path, rows: dict[str, Any], predictions: dict[str, Any], names: list[str] = NAMES) -> None:
    """Writes the rows of train and their predictions."""
    for folder in ("data", "predictions"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    write_arrow(home / "data/train.arrow", pa.table(rows))
    (home / "data/labels.json").write_text(json.dumps(names))
    count = len(rows["text"])
    columns = {"row": range(count), "label": rows["label"], **predictions, "tokens": np.full(count, 3, np.int32)}
    table = pa.table(columns).replace_schema_metadata({THRESHOLDS: json.dumps([0.5] * len(names))})
    pq.write_table(table, home / "predictions/train.parquet")


def listed(home: Path, task: str = "sequence-classification", **settings: Any) -> tuple[dict[str, Any], list[Any]]:
    """The result, and the lines of the file."""
    inputs = folders(home, "data", "predictions", *(["other"] if (home / "other").is_dir() else []))
    given = {"task": task, "options": {}, "columns": ["text"], "decided": [], **settings}
    result = run(list_labels, home / "job", inputs, **given)
    with open(home / "job/output/review.csv", newline="", encoding="utf-8-sig") as file:
        return result, list(csv.DictReader(file))


@pytest.fixture(scope="module")
def reviews() -> dict[str, Any]:
    """800 rows: a model that is right and mostly sure, and the labels of rows 0 to 19 are wrong."""
    random = np.random.default_rng(0)
    truth = random.integers(0, 2, 800)
    surplus = np.abs(random.normal(4, 1.5, 800)) + 0.5
    logits = np.zeros((800, 2), np.float32)
    logits[np.arange(800), truth] = surplus
    given = truth.copy()
    given[:20] = 1 - given[:20]
    logits[np.arange(20), truth[:20]] = np.linspace(7, 5, 20)
    texts = [f"review {number}" for number in range(800)]
    texts[3] = "=cmd|' /C calc'!A0"
    return {"text": texts, "label": given, "logits": logits, "truth": truth}


def predicted(reviews: dict[str, Any]) -> dict[str, Any]:
    return {"prediction": reviews["logits"].argmax(-1), "logits": list(reviews["logits"])}


def test_planted_errors_are_listed_first_with_the_true_label_and_a_share(
    tmp_path: Path, reviews: dict[str, Any]
) -> None:
    write(tmp_path, {"text": reviews["text"], "label": reviews["label"]}, predicted(reviews))
    result, lines = listed(tmp_path)
    assert list(lines[0]) == [*COLUMNS] and {line["decision"] for line in lines} == {""}
    first = {name_of(text) for text in reviews["text"][:20]}
    assert {line["row"] for line in lines[:20]} == first and result["suspects"] == len(lines)
    for line in lines[:20]:
        row = [name_of(text) for text in reviews["text"]].index(line["row"])
        assert (line["label"], line["suggestion"]) == (NAMES[reviews["label"][row]], NAMES[reviews["truth"][row]])
    assert next(line["text"] for line in lines if line["row"] == name_of(reviews["text"][3])).startswith("'=cmd")
    share = result["share"]
    assert share["low"] <= 20 / len(lines) <= share["high"]
    assert result["noise"] == pytest.approx(0.025, abs=0.01) and result["known"] > 200


def test_rows_that_are_decided_are_not_listed_again(tmp_path: Path, reviews: dict[str, Any]) -> None:
    write(tmp_path, {"text": reviews["text"], "label": reviews["label"]}, predicted(reviews))
    decided = [name_of(text) for text in reviews["text"][:5]]
    result, lines = listed(tmp_path, decided=decided)
    assert not {line["row"] for line in lines} & {*decided}
    assert (result["rows"], result["decided"]) == (795, 5) and {*decided} & {name_of(t) for t in reviews["text"]}


def test_equal_rows_are_listed_once_and_those_with_different_labels_apart(
    tmp_path: Path, reviews: dict[str, Any]
) -> None:
    texts, labels, logits = list(reviews["text"]), reviews["label"].copy(), reviews["logits"].copy()
    texts[1], labels[1], logits[1] = texts[0], labels[0], logits[0]
    texts[501], labels[500], labels[501], logits[500:502] = texts[500], 0, 1, [0.2, 0.0]
    rows = {**reviews, "logits": logits}
    write(tmp_path, {"text": texts, "label": labels}, predicted(rows))
    result, lines = listed(tmp_path)
    assert [line["row"] for line in lines].count(name_of(texts[0])) == 1
    assert result["repeats"] == 1 and result["conflicts"] == 1
    assert [line["row"] for line in lines].count(name_of(texts[500])) == 1


def test_rows_that_another_source_labels_otherwise_follow_with_its_label(
    tmp_path: Path, reviews: dict[str, Any]
) -> None:
    write(tmp_path, {"text": reviews["text"], "label": reviews["label"]}, predicted(reviews))
    (tmp_path / "other").mkdir()
    texts = [*reviews["text"][600:620], "a text of its own", reviews["text"][0]]
    theirs = [*reviews["label"][600:618], *(1 - reviews["label"][618:620]), 0, reviews["truth"][0]]
    write_arrow(tmp_path / "other/test.arrow", pa.table({"text": texts, "label": theirs}))
    (tmp_path / "other/labels.json").write_text(json.dumps(NAMES))
    result, lines = listed(tmp_path)
    assert result["differing"] == 3  # the first is a suspect, too
    assert [line["row"] for line in lines[result["suspects"] :]] == [name_of(text) for text in texts[18:20]]
    assert [line["suggestion"] for line in lines[-2:]] == [NAMES[label] for label in theirs[18:20]]


def test_several_labels_tags_and_numbers_are_listed_in_the_form_of_decisions(tmp_path: Path) -> None:
    random, count = np.random.default_rng(1), 400
    texts = [f"text {number}" for number in range(count)]
    has = random.random((count, 3)) < 0.4
    given = has.copy()
    given[:8, 2] ^= True
    logits = np.where(has, 1.0, -1.0) * random.uniform(4, 7, has.shape)
    names = ["a", "b", "c"]
    rows = {"text": texts, "label": [np.flatnonzero(one).tolist() for one in given]}
    write(tmp_path / "many", rows, {"logits": list(logits.astype(np.float32))}, names)
    result, lines = listed(tmp_path / "many", "multi-label-classification")
    planted = [name_of(text) for text in texts[:8]]
    assert {line["row"] for line in lines} <= {*planted} and len(lines) > 5
    assert result["share"]["high"] == 1  # 8 errors of 1,200 may be those of an overconfident model, too
    row = planted.index(lines[0]["row"])
    for cell, mask in (("label", given[row]), ("suggestion", has[row])):
        assert json.loads(lines[0][cell]) == [names[place] for place in np.flatnonzero(mask)]

    words = [[f"w{number}", "sat", "down"] for number in range(count)]
    tags = [[1, 0, 0]] * 50 + [[0, 0, 0]] * (count - 50)
    found = [list(one) for one in tags]
    found[60] = [1, 0, 0]
    sure = {"prediction": found, "probability": [[0.999, 0.99, 0.98]] * count}
    write(tmp_path / "tags", {"text": words, "label": tags}, sure, ["O", "B-PER"])
    _, (line, *others) = listed(tmp_path / "tags", "token-classification")
    assert not others and json.loads(line["label"]) == ["O", "O", "O"] and line["text"] == "w60 sat down"
    assert json.loads(line["suggestion"]) == ["B-PER", "O", "O"]

    numbers = random.normal(size=count)
    wrong = numbers.copy()
    wrong[9] += 8
    write(tmp_path / "numbers", {"text": texts, "label": wrong}, {"prediction": numbers + 0.1}, [])
    result, (line, *others) = listed(tmp_path / "numbers", "regression")
    assert not others and line["row"] == name_of(texts[9]) and result["share"] is result["known"] is None
    assert float(line["label"]) == wrong[9] and float(line["suggestion"]) == pytest.approx(numbers[9] + 0.1, rel=1e-3)


def test_a_task_type_without_labels_says_so(tmp_path: Path) -> None:
    losses = {"loss": [1.0, 2.0], "targets": [3, 3], "hits": [1, 2]}
    write(tmp_path, {"text": ["a", "b"], "label": [0, 0]}, losses)
    (problem,) = raised_problems(listed, tmp_path, "causal-lm")
    assert problem.message.startswith("'causal-lm' has no labels that can be wrong")
