"""Problems and splits as text."""

from __future__ import annotations

from typing import Any

import pytest

from flows.reports.tables import (
    align,
    count_line,
    fit_to_terminal,
    label_lines,
    problem_line,
    problem_lines,
    split_lines,
    verdict_lines,
    wrap,
)
from tasks.cache.results import Check, Verdict
from tests.made import COMPARISON
from training.problems import Problem


def problem(level: str, message: str, check: str | None = None) -> dict[str, Any]:
    return {"kind": "data", "level": level, "check": check, "where": "a.csv row 2", "message": message}


FOUND = [problem("warning", "stands twice.", "duplicates"), problem("error", "has no text. " * 5, "blank_text")]


def test_errors_come_first_and_each_problem_is_one_line_for_grep() -> None:
    error, warning = problem_lines(FOUND, None)
    assert error.startswith("error    blank_text  a.csv row 2: has no text. has no text.")
    assert warning == "warning  duplicates  a.csv row 2: stands twice."
    assert "\n" not in error


def test_for_a_person_messages_are_wrapped_to_the_right_of_their_check() -> None:
    lines = problem_lines(FOUND, 66)
    assert lines[0] == "error    blank_text  a.csv row 2: has no text. has no text. has no"
    assert lines[1] == "                     text. has no text. has no text."
    assert problem_lines(FOUND, 30) == problem_lines(FOUND, None)  # too narrow to wrap


def test_problems_that_no_check_found_have_no_empty_column() -> None:
    assert problem_lines([problem("error", "is absent.")], None) == ["error    a.csv row 2: is absent."]


def test_texts_of_rows_do_not_control_the_terminal() -> None:
    hostile = "\x1b]52;c;cm0gLXJm\x07\x9b31m\u202eabc\r"
    assert align([["label"], [hostile]])[1] == r"\x1b]52;c;cm0gLXJm\x07\x9b31m\u202eabc\r"
    assert "\x1b" not in "".join(wrap(hostile, 80, "", ""))
    assert Problem(kind="data", where=f"{hostile}.csv", message=hostile).message.startswith(r"\x1b]52")


def test_a_warning_is_marked_where_problems_are_listed_alone() -> None:
    assert problem_line(FOUND[0]) == "warning: a.csv row 2: stands twice."
    assert problem_line({"where": "fit", "message": "was killed."}) == "fit: was killed."


@pytest.mark.parametrize(
    ("levels", "line"),
    [
        ([], "No problems."),
        (["error"], "1 error."),
        (["warning", "error", "error"], "2 errors, 1 warning."),
    ],
)
def test_the_last_line_counts(levels: list[str], line: str) -> None:
    assert count_line([problem(level, "") for level in levels]) == line


def test_columns_that_say_nothing_are_left_out() -> None:
    lengths = {"train": {"min": 1, "median": 5, "max": 1200}, "validation": {}}
    report = {
        "rows": {"train": 1500, "validation": 0},
        "held_out": {"validation": 0.1},
        "filtered": {"train": 0, "validation": 0},
        "left_out": {"train": 12, "validation": 0},
        "characters": lengths,
    }
    assert split_lines(report, None) == [
        "split        rows  held out  left out  characters",
        "train       1,500                  12  1 to 1,200, median 5",
        "validation      0       10%",
    ]
    tokens = {"length": lengths, "truncated": {"train": 15, "validation": 0}}
    assert [line.split()[-2:] for line in split_lines(report, tokens)][:2] == [["rows", "cut"], ["15", "(1.0%)"]]


def test_splits_show_their_groups_or_times() -> None:
    report = {
        "rows": {"train": 70, "validation": 10},
        "held_out": {"validation": 0.1},
        "filtered": {},
        "left_out": {},
        "characters": {},
    }
    by_group = report | {"split": {"groups": {"train": 12, "validation": 3}, "without_group": {}}}
    assert split_lines(by_group, None) == [
        "split       rows  held out  groups",
        "train         70                12",
        "validation    10       10%       3",
    ]
    times = {"train": ["2026-01-01", "2026-03-01"], "validation": ["2026-03-08", "2026-03-14"]}
    by_time = report | {"split": {"times": times, "in_gap": {"train": 4, "validation": 0}}}
    assert split_lines(by_time, None) == [
        "split       rows  held out  in gap  times",
        "train         70                 4  2026-01-01 to 2026-03-01",
        "validation    10       10%          2026-03-08 to 2026-03-14",
    ]


def test_labels_have_bars_that_fit_and_names_that_cannot_harm_the_terminal() -> None:
    labels = {"train": {"good\x1b[2J": 3, "日本語": 1}, "test": {"good\x1b[2J": 0, "日本語": 0}}
    assert label_lines(labels, 80) == [
        "label     train                   test",
        "good�[2J      3  75.0%  ███████▌     0  0.0%",
        "日本語        1  25.0%  ██▌          0  0.0%",
    ]
    assert max(map(len, label_lines(labels, 44))) <= 44


def test_labels_that_begin_alike_have_a_line_each() -> None:
    lines = label_lines({"train": {"a complaint about the parcel": 3, "a complaint about the part": 1}}, 80)
    assert [line.split()[-3] for line in lines[1:]] == ["3", "1"]


def test_a_line_of_wide_letters_is_cut_to_the_columns_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "9")
    assert fit_to_terminal(["日本語日本", "abcdefghi", "short"]) == ["日本語日…", "abcdefghi", "short"]


def test_rows_without_labels_have_no_table_of_them() -> None:
    assert label_lines({"train": {}, "validation": {}}, 80) == []


def test_the_rarest_of_many_labels_share_a_line() -> None:
    lines = label_lines({"train": {f"label {n}": 100 - n for n in range(40)}}, 80)
    assert len(lines) == 32 and lines[-1].startswith("10 others") and lines[-1].split()[2] == "655"


def test_a_verdict_has_its_reason_its_bounds_the_champion_and_its_warnings() -> None:
    less_sure = {"at_least": -0.0021, "confidence": 0.975, "p_value": 0.0193, "better": False}
    comparison = COMPARISON.model_copy(update=less_sure)
    checks = [
        Check(figure="test.accuracy", value=0.871, minimum=0.75),
        Check(figure="test.log_loss", value=float("nan"), maximum=0.5),
    ]
    verdict = Verdict(decision="keep", reason="It is so.", checks=checks, comparison=comparison, warnings=["Few rows."])
    lines = verdict_lines(verdict)
    assert lines == [
        "Verdict: keep",
        "  It is so.",
        "  figure          value  bound   held",
        "  test.accuracy  0.8710  ≥ 0.75  yes",
        "  test.log_loss       -  ≤ 0.5   no",
        "  figure            new  small/1  gain     at least, 97.5%  margin      p  test",
        "  test.accuracy  0.8710   0.8603  +0.0107  -0.0021               0  0.019  mcnemar",
        "  warning: Few rows.",
    ]
    # As a run's result keeps it, where what is not a number is null.
    kept = verdict.model_dump(mode="json")
    assert kept["checks"][1]["value"] is None and verdict_lines(Verdict.model_validate(kept)) == lines
