"""What watchers are told of a stage's report on rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.runtime.code import code_digests
from tasks.runtime.reports import as_markdown, problems_table, read_report, tell_warnings
from tasks.runtime.stage import Work
from tests.tasks.watching import Heard
from training.problems import Problem


def warnings(number: int) -> list[dict[str, Any]]:
    return [
        Problem(kind="data", where=f"row {n}", message="stands twice.", level="warning").model_dump()
        for n in range(number)
    ]


def told(tmp_path: Path, number: int) -> list[str]:
    seen = Heard()
    tell_warnings(Work("key", tmp_path, "run", [seen], "load_data"), {"problems": warnings(number)})
    assert {event["kind"] for event in seen.events} <= {"warning"}
    return [event["message"] for event in seen.events]


def test_each_warning_is_told_with_its_place(tmp_path: Path) -> None:
    assert told(tmp_path, 2) == ["row 0: stands twice.", "row 1: stands twice."]
    assert told(tmp_path, 0) == []


def test_of_many_warnings_the_first_are_told_and_where_the_others_are(tmp_path: Path) -> None:
    lines = told(tmp_path, 1012)
    assert len(lines) == 11 and lines[-1] == "… and 1,002 more: see the report, load_data/report.json in MLflow."


def test_a_table_of_many_problems_ends_and_one_of_none_says_so() -> None:
    assert [row["message"] for row in problems_table([])] == ["No problems."]
    table = problems_table(warnings(300))
    assert len(table) == 201 and table[-1]["message"] == "… and 100 more: see the report."


def test_rows_that_were_never_read_have_no_description() -> None:
    assert as_markdown(None, None) == ""


def test_an_artifact_without_a_report_has_none(tmp_path: Path) -> None:
    assert read_report(tmp_path) is None


def test_how_a_report_is_drawn_is_no_ingredient_of_rows_and_tokens() -> None:
    files = code_digests(["tasks.data", "tasks.tokens"])
    assert "training/tokens.py" in files and "training/pictures.py" not in files
