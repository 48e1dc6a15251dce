"""Decisions of people about labels: data.corrections."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION
from tests.training.data.test_load import report_of, rows_of
from training.data.arrow_columns import as_json
from training.data.corrections import COLUMNS, row_names
from training.data.duplicates import hash_texts
from training.data.ipc_files import groups_file
from training.data.load_rows import load
from training.problems import Problem
from training.recipe import Data
from training.recipe.task_specification import specification

TEXTS = {f"text {number}": "pos" if number % 2 else "neg" for number in range(60)}


def name_of(text: str) -> str:
    """The name of a row with this text."""
    return row_names(hash_texts([text]))[0]


def write_rows(folder: Path, rows: dict[str, Any] = TEXTS, name: str = "train") -> list[str]:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows.items()))
    return [str(file)]


def decide(file: Path, decisions: dict[str, str], listed: dict[str, Any] = TEXTS, **options: Any) -> str:
    """Writes the file of decisions by text."""
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, **options).writerows(
            [COLUMNS, *((name_of(text), text, listed.get(text, ""), "", word) for text, word in decisions.items())]
        )
    return str(file)


def read(folder: Path, file: str, task: Any = CLASSIFICATION, rows: dict[str, Any] = TEXTS, **fields: Any) -> Any:
    """The rows of each split, and the report."""
    data = Data.model_validate({"source": "json", "path": "-", "text": ["text"], "label": "label", **fields})
    out, given = folder / "out", {"train": write_rows(folder, rows)}
    if "test_size" not in fields:
        given["validation"] = write_rows(folder, {f"valid {text}": rows[text] for text in [*rows][:6]}, "validation")
    load(data, task, given, out, corrections=file)
    report, names = report_of(out), json.loads((out / "labels.json").read_text())
    found = {
        split: {row["text"]: names[row["label"]] if names else row["label"] for row in rows_of(out, split)}
        for split in report["rows"]
    }
    return found, report


def problems_of(folder: Path, file: str, **more: Any) -> list[Problem]:
    return [one for one in raised_problems(read, folder, file, **more) if one.level == "error"]


def warnings_of(report: dict[str, Any]) -> list[str]:
    return [one["message"] for one in report["problems"] if one["check"] == "unmatched_corrections"]


def test_rows_get_their_labels_or_are_left_out_and_no_row_changes_its_split(tmp_path: Path) -> None:
    plain, _ = read(tmp_path, decide(tmp_path / "none.csv", {}), test_size=0.2)
    first, second, third, fourth, fifth = list(plain["train"])[:5]
    words = {first: "pos" if TEXTS[first] == "neg" else "neg", second: "drop", third: "keep", fourth: ""}
    words |= {fifth: TEXTS[fifth], next(iter(plain["test"])): "drop", "gone": "pos"}
    found, report = read(tmp_path, decide(tmp_path / "decided.csv", words), test_size=0.2)
    expected = {text: label for text, label in plain["train"].items() if text != second}
    assert found == {**plain, "train": expected | {first: words[first]}}
    assert report["corrections"] == {
        "corrected": 1, "dropped": 1, "kept": 1, "already_right": 1,
        "changed": 0, "unmatched": 1, "held_out": 1, "undecided": 1,
    }  # fmt: skip
    assert sum(report["labels"]["train"].values()) == report["rows"]["train"] == len(found["train"])
    gone, held_out = warnings_of(report)
    assert gone.startswith("1 decision is about a row that the source does not have") and "row 8 of" in gone
    assert held_out.startswith("1 decision is about a row of validation or test (row 7 of the file), which stay")


def test_rows_that_are_left_out_do_not_move_the_cut_between_splits_by_time(tmp_path: Path) -> None:
    rows = [
        {"text": text, "label": label, "day": f"2026-01-{1 + place // 2:02}"}
        for place, (text, label) in enumerate(TEXTS.items())
    ]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = Data.model_validate(
        {
            "source": "json",
            "path": "-",
            "text": ["text"],
            "label": "label",
            "validation_size": 0.2,
            "split": {"by": "time", "column": "day"},
        }
    )
    found = []
    for words in ({}, dict.fromkeys([*TEXTS][:20], "drop")):
        file = decide(tmp_path / "decided.csv", words)
        load(data, CLASSIFICATION, {"train": [str(tmp_path / "train.jsonl")]}, tmp_path / "out", corrections=file)
        assert not any(report_of(tmp_path / "out")["split"]["in_gap"].values())
        found.append({split: rows_of(tmp_path / "out", split) for split in ("train", "validation")})
    assert found[0]["validation"] == found[1]["validation"] and found[0]["train"][20:] == found[1]["train"]


def test_a_file_that_a_spreadsheet_has_saved_reads_back(tmp_path: Path) -> None:
    first, second, third = list(TEXTS)[:3]
    rows = [
        ["", " Suggestion", "Decision ", "ROW", "Text"],
        ["1", "", "POS", name_of(first), 'he said "no";\nand left'],
        ["2", "", "Drop", name_of(second), "x" * 200_000],
        [],
        ["3", "'-", " ", name_of(third), "=1+1"],
    ]
    file = tmp_path / "decided.csv"
    for encoding in ("utf-8-sig", "utf-16", "cp1252"):
        with file.open("w", newline="", encoding=encoding) as out:
            out.write("sep=;\r\n" if encoding == "utf-16" else "")
            csv.writer(out, delimiter=";").writerows(rows)
        found, report = read(tmp_path, str(file))
        assert found["train"] == {
            text: "pos" if text == first else label for text, label in TEXTS.items() if text != second
        }
        assert report["corrections"]["undecided"] == 1 and not warnings_of(report)


def test_all_mistakes_of_a_file_are_one_message(tmp_path: Path) -> None:
    first, second, third = list(TEXTS)[:3]
    file = Path(decide(tmp_path / "decided.csv", {first: "posi", second: "neg", third: "drop"}))
    with file.open("a") as out:
        out.write(f"{name_of(second)},,,,drop\n12,,,,drop\n{name_of(third)},,,,drop\n")
    found = {one.where.rpartition("/")[2]: one.message for one in problems_of(tmp_path, str(file))}
    assert found.keys() == {"decided.csv row 2", "decided.csv row 3", "decided.csv row 6"}
    assert found["decided.csv row 2"] == (
        "decision 'posi' is no label: choose from 'neg', 'pos', or drop, keep or nothing. Did you mean 'pos'?"
    )
    assert found["decided.csv row 3"].endswith("has several decisions, 'neg' in row 3 and 'drop' in row 5: leave one.")
    assert found["decided.csv row 6"].startswith("names no row by '12': copy the name")
    file.write_text("row;label\n")
    (problem,) = problems_of(tmp_path, str(file))
    assert problem.where == "data.corrections" and "has no column 'decision'; it has row, label: " in problem.message


def test_a_small_file_takes_little_time_and_memory(tmp_path: Path) -> None:
    first = next(iter(TEXTS))
    file = tmp_path / "decided.csv"
    file.write_text("row,decision" + "," * 100_000 + "\na,neg" * 100_000)
    (problem,) = problems_of(tmp_path, str(file))
    assert problem.where.endswith("decided.csv row 2") and "(100,000 rows like this: 2, 3, 4, 5, 6)" in problem.message
    file.write_text(f"row,decision\n{name_of(first)},{'[' * 100_000}\n")
    (problem,) = problems_of(tmp_path, str(file))
    assert problem.where.endswith("decided.csv row 2") and "is no label: choose from 'neg', 'pos'" in problem.message


def test_a_label_that_has_the_name_of_a_decision_is_not_mistaken_for_it(tmp_path: Path) -> None:
    texts = {text: "drop" if label == "pos" else "hold" for text, label in TEXTS.items()}
    held = [text for text, label in texts.items() if label == "hold"]
    (problem,) = problems_of(tmp_path, decide(tmp_path / "a.csv", {held[0]: "drop"}), rows=texts)
    assert problem.message == """decision 'drop' may be the label 'drop', too: write ["drop"] for it, or (drop)."""
    file = decide(tmp_path / "b.csv", {held[0]: '["drop"]', held[1]: "(drop)"})
    found, report = read(tmp_path, file, rows=texts)
    assert (
        found["train"][held[0]] == "drop" and held[1] not in found["train"] and report["corrections"]["corrected"] == 1
    )


@pytest.mark.parametrize("numbers", [("0", "1"), ("3", "8")])
def test_labels_have_their_names_where_rows_spell_numbers(tmp_path: Path, numbers: tuple[str, str]) -> None:
    texts = {text: numbers[label == "pos"] for text, label in TEXTS.items()}
    first, second = list(TEXTS)[:2]
    file = decide(tmp_path / "decided.csv", {first: "pos", second: "neg"})
    found, report = read(tmp_path, file, rows=texts, label_names=["neg", "pos"])
    assert found["train"] == TEXTS | {first: "pos", second: "neg"}
    assert report["corrections"]["corrected"] == 2 and report["corrections"]["changed"] == 0


def test_a_label_that_changed_since_the_list_is_warned_of(tmp_path: Path) -> None:
    first = next(iter(TEXTS))
    file = decide(tmp_path / "decided.csv", {first: "pos"})
    rows = {**TEXTS, first: "mixed", "another": "mixed", "one more": "mixed"}
    found, report = read(tmp_path, file, rows=rows)
    assert found["train"][first] == "pos" and report["corrections"]["changed"] == 1
    assert warnings_of(report)[0].startswith("1 row has another label now than when they were listed: the decision")


def test_several_labels_tags_and_numbers_are_corrected(tmp_path: Path) -> None:
    texts = {f"text {number}": ["a", "b"][: number % 3] for number in range(60)}
    first, second, third = list(texts)[:3]
    many = specification("multi-label-classification")
    file = decide(tmp_path / "a.csv", {first: '["b"]', second: "[]", third: "b"})
    data = Data.model_validate({"source": "json", "path": "-", "text": ["text"], "label": "label"})
    load(
        data,
        many,
        {"train": write_rows(tmp_path, texts), "validation": write_rows(tmp_path, texts, "v")},
        tmp_path / "many",
        corrections=file,
    )
    assert [row["label"] for row in rows_of(tmp_path / "many", "train")][:3] == [[1], [], [1]]
    tags = Data.model_validate({"source": "json", "path": "-", "text": ["text"], "label": "label"})
    words = {"train": [{"text": ["Ada", "ran"], "label": ["O", "O"]}, {"text": ["Bo"], "label": ["B-PER"]}]}
    words["validation"] = [{"text": ["Ada", "ran", "on"], "label": ["B-PER", "O", "O"]}]
    files = {split: [str(tmp_path / f"{split}.jsonl")] for split in words}
    for split, rows in words.items():
        Path(files[split][0]).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    name = name_of(as_json(["Ada", "ran"]))
    for decision in ('["B-PER"]', '["B-PER", "O"]'):
        (tmp_path / "tags.csv").write_text(f"row;decision\n{name};{decision}\n")
        arguments = (tags, specification("token-classification"), files, tmp_path / "tags")
        if decision == '["B-PER"]':
            (problem,) = raised_problems(load, *arguments, corrections=str(tmp_path / "tags.csv"))
            assert "has 1 tags for 2 words: write a JSON list of 2" in problem.message
        else:
            load(*arguments, corrections=str(tmp_path / "tags.csv"))
    assert json.loads((tmp_path / "tags" / "labels.json").read_text()) == ["O", "B-PER"]
    assert [row["label"] for row in rows_of(tmp_path / "tags", "train")] == [[1, 0], [1]]
    numbers = {f"text {number}": float(number) for number in range(60)}
    file = decide(tmp_path / "b.csv", {first: "2,5", second: "many"}, numbers, delimiter=";")
    regression = specification("regression")
    (problem,) = problems_of(tmp_path, file, task=regression, rows=numbers)
    assert problem.message == "decision 'many' is no finite number: write one, or drop, keep or nothing."
    file = decide(tmp_path / "c.csv", {first: "2,5"}, numbers, delimiter=";")
    found, _ = read(tmp_path, file, regression, numbers)
    assert found["train"][first] == 2.5


def test_rows_that_are_left_out_are_not_in_the_file_of_groups(tmp_path: Path) -> None:
    rows = [{"text": text, "label": label, "user": place // 3} for place, (text, label) in enumerate(TEXTS.items())]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fields = {"validation_size": 0.3, "split": {"by": "group", "column": "user"}}
    data = Data.model_validate({"source": "json", "path": "-", "text": ["text"], "label": "label", **fields})
    file, files = (
        decide(tmp_path / "decided.csv", dict.fromkeys([*TEXTS][::3], "drop")),
        [str(tmp_path / "train.jsonl")],
    )
    load(data, CLASSIFICATION, {"train": files}, tmp_path / "out", corrections=file)
    groups = read_arrow(tmp_path / "out" / groups_file("train"))["group"].to_pylist()
    users = [rows[[*TEXTS].index(row["text"])]["user"] for row in rows_of(tmp_path / "out", "train")]
    assert len(groups) == len(users) and len({*zip(groups, users, strict=True)}) == len({*users})
