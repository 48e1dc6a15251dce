"""The problems that each check finds, their messages, and the rows that remain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION
from training.data.checks import LEAVES_OUT, ROW_CHECKS, ROW_REMARKS, SET_CHECKS, SPLIT_CHECKS
from training.data.leakage_checks import GROUP_CHECKS, SHARED_TEXT_CHECKS, SIGN_CHECKS
from training.data.load_rows import load
from training.problems import Problem, UserError
from training.recipe import Data
from training.recipe.column_types import RowSpecification
from training.recipe.tables.row_checks import LEVELS
from training.task_types.kto import Kto
from training.task_types.preference import Preference
from training.task_types.sentence_similarity import SentenceSimilarity

Pair = tuple[Any, Any]
GOOD: list[Pair] = [("one", "a"), ("two", "b")]
FOUND_IN_CSV = {"header_row", "stray_quotes", "line_breaks", "merged_rows"}
FOUND_WHILE_READING = {
    *("encoding", "ragged", "malformed", "type", "missing_image", "iob1", "comment_lines", "thousands"),
    *FOUND_IN_CSV,
}


def run(folder: Path, rows: dict[str, list[Pair]], **data: Any) -> dict[str, Any]:
    """The report on these rows."""
    for split, pairs in rows.items():
        lines = (json.dumps({"t": t, "y": y, "n": n}) + "\n" for n, (t, y) in enumerate(pairs))
        (folder / f"{split}.jsonl").write_text("".join(lines))
    files = {split: [str(folder / f"{split}.jsonl")] for split in rows}
    load(Data(source="json", path="-", text=["t"], label="y", **data), CLASSIFICATION, files, folder / "out")
    report: dict[str, Any] = json.loads((folder / "out" / "log" / "report.json").read_text())
    return report


def warnings(folder: Path, rows: dict[str, list[Pair]], **data: Any) -> dict[str, Problem]:
    """The problems of the report by check, with places as seen from the folder."""
    found = [Problem(**problem) for problem in run(folder, rows, **data)["problems"]]
    return {p.check or "": p.model_copy(update={"where": p.where.removeprefix(f"{folder}/")}) for p in found}


def errors(folder: Path, rows: dict[str, list[Pair]], **data: Any) -> set[str | None]:
    return {problem.check for problem in raised_problems(run, folder, rows, **data) if problem.level == "error"}


def texts(folder: Path, split: str = "train") -> list[str]:
    found: list[str] = read_arrow(folder / "out" / f"{split}.arrow")["text"].to_pylist()
    return found


def test_every_check_has_a_level_and_every_level_a_check() -> None:
    of_leakage = {*SHARED_TEXT_CHECKS, *SIGN_CHECKS, *GROUP_CHECKS}
    of_splits = {*SPLIT_CHECKS, *of_leakage, *SET_CHECKS, "missing_group", "missing_time", "unmatched_corrections"}
    by_tokenizer, of_teacher = {"refused_by_template", "truncated"}, {"teacher_rows"}
    assert {*FOUND_WHILE_READING, *ROW_CHECKS, *ROW_REMARKS, *of_splits, *by_tokenizer, *of_teacher} == set(LEVELS)
    assert set(ROW_CHECKS) < set(LEAVES_OUT) < set(LEVELS)


def test_a_repeated_text_is_reported_with_both_rows_and_the_text(tmp_path: Path) -> None:
    rows = {"train": [*GOOD, ("one", "a"), ("three", "a"), ("two", "b")], "validation": [("x", "a"), ("y", "b")]}
    found = warnings(tmp_path, rows)
    assert list(found) == ["duplicates"]
    assert found["duplicates"].where == "train.jsonl row 3"
    assert "2 rows of train repeat the text of an earlier row" in found["duplicates"].message
    assert "(this one repeats row 1: 'one')" in found["duplicates"].message


def test_different_labels_of_a_text_are_reported_with_both_rows_and_labels(tmp_path: Path) -> None:
    rows = {"train": [*GOOD, ("three", "a"), ("one", "b"), ("one", "a")], "validation": [("x", "a"), ("y", "b")]}
    problem = warnings(tmp_path, rows)["conflicting_labels"]
    assert problem.where == "train.jsonl row 4"
    assert "1 text has different labels in different rows of train ('b' here, 'a' in row 1: 'one')" in problem.message


@pytest.mark.parametrize("kind", [Preference(), Kto()])
def test_judgements_of_equal_answers_in_opposite_ways_are_reported_with_both_rows(
    tmp_path: Path, kind: RowSpecification
) -> None:
    judged = [("p", "x", "y"), ("p", "x", "z"), ("q", "y", "x"), ("p", "y", "x"), ("p", "x", "y")]
    if isinstance(kind, Kto):
        judged = [("p", "x", True), ("p", "y", False), ("q", "x", False), ("p", "x", False), ("p", "x", True)]
    names = [*kind.column_sets()[0]][:3]
    files = {split: [str(tmp_path / f"{split}.jsonl")] for split in ("train", "validation")}
    for (file,) in files.values():
        lines = [json.dumps(dict(zip(names, row, strict=False))) for row in judged]
        Path(file).write_text("\n".join(lines) + "\n")
    levels = {"duplicates": "ignore", "shared_rows": "ignore"}
    data = Data(source="json", path="-", columns={name: name for name in names if name != "label"}, checks=levels)
    load(data, kind, files, tmp_path / "out")
    problems = json.loads((tmp_path / "out" / "log" / "report.json").read_text())["problems"]
    assert [(one["check"], Path(one["where"]).name) for one in problems] == [
        ("conflicting_labels", f"{split}.jsonl row 4") for split in files
    ]
    assert "1 judgement has its opposite in another row of train (this one repeats row 1 the" in problems[0]["message"]


def test_a_rating_that_is_a_large_number_is_a_problem_of_its_row(tmp_path: Path) -> None:
    columns = {"prompt": ["p", "q", "r"], "completion": ["x", "y", "z"], "label": [1, 0, 2**60 + 1]}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    data = Data(source="parquet", path="-", columns={"prompt": "prompt", "completion": "completion"}, label="label")
    with pytest.raises(UserError, match=r"row 3: holds no .* in column 'label': 1152921504606846977"):
        load(data, Kto(), {"train": [str(tmp_path / "train.parquet")]}, tmp_path / "out")


@pytest.mark.parametrize("kind", [Preference(), Kto()])
def test_a_prompt_with_several_answers_is_no_duplicate_and_a_repeated_judgement_is(
    tmp_path: Path, kind: RowSpecification
) -> None:
    judged: list[tuple[Any, ...]] = [("p", "x", "y"), ("p", "x", "z"), ("q", "x", "y"), ("p", "x", "y")]
    if isinstance(kind, Kto):
        judged = [("p", "x", True), ("p", "y", False), ("q", "x", True), ("p", "x", True)]
    names, files = (
        [*kind.column_sets()[0]][:3],
        {split: [str(tmp_path / f"{split}.jsonl")] for split in ("train", "validation")},
    )
    for split, (file,) in files.items():
        rows = judged if split == "train" else judged[:3]
        Path(file).write_text("".join(json.dumps(dict(zip(names, row, strict=False))) + "\n" for row in rows))
    columns = {name: name for name in names if name != "label"}
    data = Data(source="json", path="-", columns=columns, checks={"shared_rows": "ignore"})
    load(data, kind, files, tmp_path / "out")
    problems = json.loads((tmp_path / "out" / "log" / "report.json").read_text())["problems"]
    assert [(one["check"], Path(one["where"]).name) for one in problems] == [("duplicates", "train.jsonl row 4")]
    assert "1 row of train repeats the text of an earlier row (this one repeats row 1: " in problems[0]["message"]


def test_rows_that_may_repeat_their_inputs_are_duplicates_only_if_they_are_equal(tmp_path: Path) -> None:
    files = {split: [str(tmp_path / f"{split}.jsonl")] for split in ("train", "validation")}
    for split, (file,) in files.items():
        rows = [("one", "two", 0.5), ("one", "three", 0.1), ("one", "two", 0.6), ("one", "two", 0.5)]
        names = ("sentence1", "sentence2", "score")
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows[: 4 if split == "train" else 3]]
        Path(file).write_text("\n".join(lines) + "\n")
    load(Data(source="json", path="-", checks={"shared_rows": "ignore"}), SentenceSimilarity(), files, tmp_path / "out")
    problems = json.loads((tmp_path / "out" / "log" / "report.json").read_text())["problems"]
    assert [(one["check"], Path(one["where"]).name) for one in problems] == [("duplicates", "train.jsonl row 4")]


def test_conversations_that_are_rated_in_opposite_ways_are_reported_and_repeated_ratings_too(tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "p"}, {"role": "assistant", "content": "x"}
    talks = [[asked, answered], [asked, {**answered, "content": "y"}], [asked, answered], [asked, answered]]
    files = {split: [str(tmp_path / f"{split}.jsonl")] for split in ("train", "validation")}
    for (file,) in files.values():
        rows = [{"messages": talk, "label": rating} for talk, rating in zip(talks, (1, 1, 0, 1), strict=True)]
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(source="json", path="-", columns={"messages": "messages"}, checks={"shared_rows": "ignore"})
    load(data, Kto(), files, tmp_path / "out")
    problems = json.loads((tmp_path / "out" / "log" / "report.json").read_text())["problems"]
    assert {(one["check"], Path(one["where"]).name) for one in problems if "train" in one["where"]} == {
        ("duplicates", "train.jsonl row 4"),
        ("conflicting_labels", "train.jsonl row 3"),
    }


def test_ratings_of_one_kind_are_reported(tmp_path: Path) -> None:
    files = {split: [str(tmp_path / f"{split}.jsonl")] for split in ("train", "validation")}
    for (file,) in files.values():
        rows = [{"prompt": f"{file} {n}", "completion": "x", "label": "validation" in file} for n in range(3)]
        Path(file).write_text("\n".join(map(json.dumps, rows)) + "\n")
    load(Data(source="json", path="-", columns={"prompt": "prompt"}), Kto(), files, tmp_path / "out")
    problems = json.loads((tmp_path / "out" / "log" / "report.json").read_text())["problems"]
    assert [(one["check"], one["message"].split(":")[0]) for one in problems] == [
        ("absent_label", "all rows of train are rated false, and none true"),
        ("absent_label", "all rows of validation are rated true, and none false"),
    ]


def test_a_text_in_two_splits_is_reported_with_both_places(tmp_path: Path) -> None:
    rows = {"train": GOOD, "validation": [("x", "a"), ("y", "b")], "test": [("z", "a"), ("two", "b"), ("one", "a")]}
    problem = warnings(tmp_path, rows)["shared_rows"]
    assert problem.where == "test.jsonl row 2"
    assert "2 rows of test are in train, too" in problem.message
    assert "repeats row 2 of" in problem.message and "train.jsonl: 'two'" in problem.message


def test_a_pair_is_repeated_only_as_a_whole(tmp_path: Path) -> None:
    for split, rows in {"train": ["a,b,x", "a,c,y", "ab,,x", "a,b,y"], "validation": ["q,r,x", "q,s,y"]}.items():
        (tmp_path / f"{split}.csv").write_text("\n".join(["s,t,label", *rows]) + "\n")
    files = {split: [str(tmp_path / f"{split}.csv")] for split in ("train", "validation")}
    data = Data(source="csv", path="-", text=["s", "t"], label="label", checks={"blank_text": "warning"})
    load(data, CLASSIFICATION, files, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "log" / "report.json").read_text())
    found = {problem["check"]: problem["message"] for problem in report["problems"]}
    assert "1 row of train repeats" in found["duplicates"] and "1 text has" in found["conflicting_labels"]


def test_a_word_for_a_missing_value_is_a_text_and_reported(tmp_path: Path) -> None:
    rows = {"train": [*GOOD, ("NaN", "a"), ("three", "null"), ("NaN", "b")], "validation": [("x", "a"), ("y", "b")]}
    (tmp_path / "in").mkdir()
    found = [problem for problem in run(tmp_path / "in", rows)["problems"] if problem["check"] == "missing_word"]
    assert "'null' is the label of 1 row of train" in found[0]["message"]
    assert "'NaN' is all the text of 2 rows of train (column 't')" in found[1]["message"]
    assert "NaN" in texts(tmp_path / "in")


def test_labels_that_are_numbers_and_words_are_reported(tmp_path: Path) -> None:
    rows = {"train": [*GOOD, ("three", "1"), ("four", "a")], "validation": [("x", "a"), ("y", "b"), ("z", "1")]}
    assert "('1') and words in others ('b')" in warnings(tmp_path, rows)["mixed_labels"].message


def test_a_split_without_a_label_is_reported(tmp_path: Path) -> None:
    assert (
        "validation split has no row of 'b'"
        in warnings(tmp_path, {"train": GOOD, "validation": [("x", "a")]})["absent_label"].message
    )


@pytest.mark.parametrize("level", ["warning", "ignore"])
def test_rows_that_cannot_be_used_are_left_out_where_they_are_no_error(tmp_path: Path, level: str) -> None:
    rows = {
        "train": [*GOOD, (" ", "a"), (None, "b"), ("three", None), (4, "a")],
        "validation": [("x", "a"), ("y", "b"), ("z", "c")],
    }
    checks = dict.fromkeys(["blank_text", "missing_label", "type", "unknown_label"], level)
    report = run(tmp_path, rows, checks=checks)
    assert (texts(tmp_path), texts(tmp_path, "validation")) == (["one", "two"], ["x", "y"])
    assert report["left_out"] == {"train": 4, "validation": 1}
    assert report["rows"] == {"train": 2, "validation": 2}
    reported = {problem["check"] for problem in report["problems"]}
    assert reported == (set(checks) if level == "warning" else set())


def test_a_consequence_of_a_mistake_is_no_mistake_of_its_own(tmp_path: Path) -> None:
    rows = {"train": [("one", "a"), ("", "b"), (5, "a")], "validation": [("x", "a"), ("y", "b")]}
    assert errors(tmp_path, rows) == {"blank_text", "type"}
    assert errors(tmp_path, {"train": GOOD, "validation": [("x", "c")]}) == {"unknown_label"}


def test_a_split_whose_labels_are_all_left_out_as_unknown_has_no_rows(tmp_path: Path) -> None:
    unknown, checks = [(f"text {n}", "xyz"[n % 3]) for n in range(9)], {"unknown_label": "warning"}
    message = r"^data\.splits\.validation: the validation split has no rows of a known label: choose another"
    with pytest.raises(UserError, match=message):
        run(tmp_path, {"train": GOOD, "validation": unknown}, checks=checks)
    message = r"data\.validation_size: no row of train of a known label fell into the 0\.5 of them that are held out"
    with pytest.raises(UserError, match=message):
        run(tmp_path, {"train": [*GOOD, *unknown]}, label_names=["q", "r"], validation_size=0.5, checks=checks)
    rows = {"train": unknown, "validation": GOOD}
    assert errors(tmp_path, rows, label_names=["a", "b"], checks=checks) == {"no_rows"}


@pytest.mark.parametrize("check", ["duplicates", "conflicting_labels", "shared_rows", "absent_label", "mixed_labels"])
def test_a_warning_can_be_made_an_error(tmp_path: Path, check: str) -> None:
    rows = {"train": [*GOOD, ("one", "b"), ("three", "1")], "validation": [("one", "a")]}
    assert errors(tmp_path, rows, checks={check: "error"}) == {check}


def test_rows_are_filtered_and_limited_and_counted(tmp_path: Path) -> None:
    rows = {"train": [(f"row {n}", "ab"[n % 2]) for n in range(20)], "validation": [("x", "a"), ("y", "b"), ("z", "a")]}
    report = run(tmp_path, rows, filter="n >= 1 and y in ('a', 'b')", limit=2)
    assert (texts(tmp_path), texts(tmp_path, "validation")) == (["row 1", "row 2"], ["y", "z"])
    assert report["filtered"] == {"train": 1, "validation": 1}


def test_columns_are_renamed_and_cast(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text("t,stars\n12,1.0\n13,2.0\n14,3.5\n")
    data = Data(
        source="csv",
        path="-",
        text=["text"],
        label="stars",
        rename={"t": "text"},
        cast={"stars": "float64"},
        filter="stars <= 3",
    )
    files = {split: [str(tmp_path / f"{split}.csv")] for split in ("train", "validation")}
    with pytest.raises(UserError, match=r"column 'stars' of .* is of type double"):
        load(data, CLASSIFICATION, files, tmp_path / "out")
    numbers = data.model_copy(update={"cast": {"stars": "int64"}})
    with pytest.raises(UserError, match=r"holds no int64 in column 'stars': '3\.5': "):
        load(numbers, CLASSIFICATION, files, tmp_path / "out")


def test_doubles_that_are_whole_can_be_labels_by_a_cast(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    for split in ("train", "validation"):
        pq.write_table(pa.table({"t": [7, 8], "y": [1.0, 0.0]}), tmp_path / f"{split}.parquet")
    files = {split: [str(tmp_path / f"{split}.parquet")] for split in ("train", "validation")}
    data = Data(source="parquet", path="-", text=["t"], label="y", cast={"y": "int64", "t": "string"})
    load(data, CLASSIFICATION, files, tmp_path / "out")
    assert read_arrow(tmp_path / "out" / "train.arrow").to_pydict() == {
        "text": ["7", "8"],
        "label": [1, 0],
    }


def test_labels_that_differ_only_by_case_or_spaces_are_reported_with_their_counts(tmp_path: Path) -> None:
    rows = [(f"t{n}", "pos" if n % 2 else "neg") for n in range(20)]
    odd = [("x", "Pos"), ("y", "pos "), ("z", " p os")]
    problem = warnings(tmp_path, {"train": [*rows, *odd], "validation": rows[:2]}, checks={"shared_rows": "ignore"})[
        "similar_labels"
    ]
    assert problem.where == "train.jsonl row 21" and (
        "'pos' (10 rows), 'Pos' (1 row), 'pos ' (1 row), ' p os' (1 row);" in problem.message
    )
    assert "similar_labels" not in warnings(tmp_path, {"train": rows, "validation": rows[:2]})


def test_whole_numbers_that_differ_in_a_late_digit_do_not_look_alike(tmp_path: Path) -> None:
    rows = [(f"t{n}", f"900719925474099{n % 2 + 2}") for n in range(20)]
    assert "similar_labels" not in warnings(tmp_path, {"train": rows, "validation": [("x", rows[0][1])]})


def test_labels_with_a_tab_or_a_line_break_are_reported_with_an_example(tmp_path: Path) -> None:
    rows = [(f"t{n}", "pos" if n % 2 else "neg") for n in range(20)]
    odd = [("x", "pos\tgood"), ("y", "neg\nbad"), ("z", "pos\tgood")]
    problem = warnings(tmp_path, {"train": [*rows, *odd], "validation": rows[:2]}, checks={"shared_rows": "ignore"})[
        "broken_label"
    ]
    assert problem.where == "train.jsonl row 21" and problem.message.startswith(
        "2 of 4 labels of train have a tab, a line break or another control character in them (3 rows, such as "
        "'pos\\tgood'), each a label for itself"
    )
    assert "broken_label" not in warnings(tmp_path, {"train": rows, "validation": rows[:2]})


def test_labels_that_are_lists_in_a_cell_are_reported_with_the_task_type_for_them(tmp_path: Path) -> None:
    rows = [(f"t{n}", "[NEG]" if n % 2 else "x, y") for n in range(20)]
    lists = [("a", "['war', 'drama']"), ("b", "[]"), ("c", '["war"]'), ("d", "[1, 2]")]
    checks = {"shared_rows": "ignore"}
    problem = warnings(tmp_path, {"train": [*rows, *lists], "validation": rows[:2]}, checks=checks)["listed_labels"]
    assert problem.where == "train.jsonl row 21" and problem.message.startswith(
        "4 of 6 labels of train are lists (4 rows"
    )
    assert "set task: multi-label-classification" in problem.message
    assert "listed_labels" not in warnings(tmp_path, {"train": rows, "validation": rows[:2]}, checks=checks)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ("cafe\N{COMBINING ACUTE ACCENT}", "with U+0301"),
        ("ca\N{ZERO WIDTH SPACE}f\N{LATIN SMALL LETTER E WITH ACUTE}", "with U+200B U+00E9"),
        ("ca\N{SOFT HYPHEN}f\N{LATIN SMALL LETTER E WITH ACUTE}", "with U+00AD U+00E9"),
        ("\N{ZERO WIDTH NO-BREAK SPACE}caf\N{LATIN SMALL LETTER E WITH ACUTE}", "with U+FEFF U+00E9"),
        ("\N{FULLWIDTH LATIN SMALL LETTER C}af\N{LATIN SMALL LETTER E WITH ACUTE}", "with U+FF43 U+00E9"),
        ("c\N{CYRILLIC SMALL LETTER A}f\N{LATIN SMALL LETTER E WITH ACUTE}", "with U+0430 U+00E9"),
    ],
)
def test_labels_that_look_alike_are_reported_with_their_code_points(tmp_path: Path, other: str, shown: str) -> None:
    label = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    rows = [("one", label), ("two", "b"), ("three", label), ("four", other)]
    problem = warnings(tmp_path, {"train": rows, "validation": rows}, checks={"shared_rows": "ignore"})[
        "similar_labels"
    ]
    assert problem.where == "train.jsonl row 4"
    assert f"{label!r} with U+00E9 (2 rows)" in problem.message and f"{other!r} {shown} (1 row)" in problem.message
    with pytest.raises(UserError, match=rf"Write it as {label!r} with U\+00E9, not as "):
        run(tmp_path, {"train": rows[:3], "validation": [("five", "b"), ("six", other)]})


@pytest.mark.parametrize(("one", "other"), [("a-b", "a\N{EN DASH}b"), ("a b", "a\N{NO-BREAK SPACE}b"), ("01", "1")])
def test_labels_with_other_dashes_spaces_or_spellings_of_a_number_are_reported(
    tmp_path: Path, one: str, other: str
) -> None:
    rows = {"train": [("x", one), ("y", other), ("z", "c")], "validation": [("p", one), ("q", "c")]}
    assert "similar_labels" in warnings(tmp_path, rows)


def test_whole_numbers_with_a_decimal_point_are_the_labels_without_one(tmp_path: Path) -> None:
    rows = {"train": [("a", "1"), ("b", "2.0"), ("c", "1.0"), ("a", "1.0")], "validation": [("d", "2.0"), ("e", "+1")]}
    found = warnings(tmp_path, rows)
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == ["1", "2"]
    assert read_arrow(tmp_path / "out" / "train.arrow")["label"].to_pylist() == [0, 1, 0, 0]
    assert read_arrow(tmp_path / "out" / "validation.arrow")["label"].to_pylist() == [1, 0]
    assert found.keys() == {"float_labels", "duplicates"}
    run(
        tmp_path,
        {"train": [("a", "0.0"), ("b", "1.0")], "validation": [("c", "1"), ("d", "0.0")]},
        label_names=["n", "p"],
    )
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == ["n", "p"]
    assert read_arrow(tmp_path / "out" / "validation.arrow")["label"].to_pylist() == [1, 0]
    run(tmp_path, {"train": [("a", 1), ("b", 2.0)], "validation": [("c", 2), ("d", 1.0)]})
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == ["1", "2"]


def test_numbers_with_a_point_stay_labels_of_their_own_where_not_all_are_whole(tmp_path: Path) -> None:
    rows = {"train": [("a", "1.0"), ("b", "1.1"), ("c", "2.0")], "validation": [("d", "2.0"), ("e", "1.1")]}
    assert "float_labels" not in warnings(tmp_path, rows, checks={"absent_label": "ignore"})
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == ["1.0", "1.1", "2.0"]
    run(
        tmp_path,
        {"train": [("a", "1.0"), ("b", "2.0")], "validation": [("d", "2.0"), ("e", "1.0")]},
        label_names=["2.0", "1.0"],
    )
    assert read_arrow(tmp_path / "out" / "train.arrow")["label"].to_pylist() == [1, 0]


def test_a_label_of_its_own_in_every_row_is_no_label(tmp_path: Path) -> None:
    ids = [(f"text {n}", f"id {n % 30}") for n in range(40)]
    checks = {"absent_label": "ignore"}
    with pytest.raises(UserError, match=r"column 'y' has 30 different values in 40 rows, so it holds no labels"):
        run(tmp_path, {"train": ids, "validation": ids[:2]}, checks=checks | {"shared_rows": "ignore"})
    copies = [(word := "spam" if n % 2 else "ham", word) for n in range(40)]
    with pytest.raises(UserError, match=r"column 'y' has the text itself in 40 of 40 rows"):
        run(tmp_path, {"train": copies, "validation": GOOD}, checks=checks | {"unknown_label": "warning"})
    few = {"train": [(f"text {n}", f"id {n % 15}") for n in range(40)], "validation": ids[:2]}
    assert "label_per_row" not in warnings(tmp_path, few, checks=checks | {"shared_rows": "ignore"})
    assert "label_per_row" not in warnings(tmp_path, {"train": ids, "validation": ids[:2]}, limit=30, checks=checks)
