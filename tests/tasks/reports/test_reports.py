"""Events for listeners from a stage's report on rows."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

from tasks.cache.code import code_digests
from tasks.cache.stage import Work
from tasks.prefect import prefect_artifacts
from tasks.reports.formatting import escape_markdown, first_line, format_code, format_markdown, format_score
from tasks.reports.model_reports import find_worst_errors, find_worst_groups, tabulate_slices
from tasks.reports.row_reports import (
    describe_rows,
    emit_warnings,
    read_token_report,
    summarize_splits,
    tabulate_problems,
)
from tasks.tracking.run_tracker import format_group_name, read_slice_metrics
from tests.arrow import group
from tests.tasks.watching import Heard
from training.problems import Problem
from training.programs.score import write_samples
from training.recipe import Recipe, parse


@pytest.mark.parametrize(
    "text",
    ["[x](javascript:alert(1))", "<img src=x onerror=a>", "![x](y)", "# head", "- item", "_a_ **b** `c` ~~d~~", "&lt;"],
)
def test_texts_of_rows_are_shown_as_they_are_where_markdown_is_rendered(text: str) -> None:
    rendered = MarkdownIt("commonmark").render(escape_markdown(text))
    assert rendered == f"<p>{html.escape(text)}</p>\n"
    (cell,) = prefect_artifacts.Table([{text: text}], "").cells()
    assert cell == {escape_markdown(text): escape_markdown(text)}
    assert escape_markdown(text) in format_markdown([{"label": text}])
    assert MarkdownIt("js-default").render(escape_markdown("www.a.org https://a.org")).count("<a ") == 0


def test_a_label_of_several_lines_or_with_codes_of_a_terminal_stays_one_piece_of_inline_code() -> None:
    label = "a`\n---\n\n[x](javascript:alert(1))\x1b]0;t\x07\u202e"
    rendered = MarkdownIt("commonmark").render(f"Labels: {format_code(label)}.")
    assert rendered == "<p>Labels: <code>a` ---  [x](javascript:alert(1))\\x1b]0;t\\x07\\u202e</code>.</p>\n"
    assert escape_markdown("a\x1b[31m\n- b") == r"a\\x1b\[31m - b"


def test_numbers_and_names_are_the_same_in_markdown() -> None:
    for text in ("0.9750 (0.960 to 0.988; baseline 0.465)", "-0.5", "+0.6748", "f1_macro", "≥ 0.75", "a-b"):
        assert escape_markdown(text) == text


def test_targets_longer_than_the_texts_that_are_generated_are_warned_of_by_split(tmp_path: Path) -> None:
    length = {"train": {"max": 90}, "validation": {"max": 40}, "test": {"max": 12}}
    (tmp_path / "log").mkdir()
    (tmp_path / "log/report.json").write_text(json.dumps({"targets": {"length": length}, "problems": []}))
    (problem,) = read_token_report(tmp_path, 12)["problems"]
    assert problem["where"] == "options.max_new_tokens" and problem["level"] == "warning"
    assert problem["message"].startswith("12 tokens are fewer than the 40 of the longest target of validation: ")
    assert not read_token_report(tmp_path, 40)["problems"] and not read_token_report(tmp_path, None)["problems"]


def warnings(number: int) -> list[dict[str, Any]]:
    return [
        Problem(kind="data", where=f"row {n}", message="stands twice.", level="warning").model_dump()
        for n in range(number)
    ]


def warnings_of(tmp_path: Path, number: int) -> list[str]:
    seen = Heard()
    emit_warnings(Work("key", tmp_path, "run", [seen], "load_data"), {"problems": warnings(number)})
    assert {event["kind"] for event in seen.events} <= {"warning"}
    return [event["message"] for event in seen.events]


def test_each_warning_is_reported_with_its_place(tmp_path: Path) -> None:
    assert warnings_of(tmp_path, 2) == ["row 0: stands twice.", "row 1: stands twice."]
    assert warnings_of(tmp_path, 0) == []


def test_of_many_warnings_the_first_are_reported_and_the_place_of_the_others(tmp_path: Path) -> None:
    lines = warnings_of(tmp_path, 1012)
    assert len(lines) == 11 and lines[-1] == "… and 1,002 more: see the report, load_data/report.json in MLflow."


def test_a_table_of_many_problems_is_cut_and_one_of_none_has_a_line() -> None:
    assert [row["message"] for row in tabulate_problems([])] == ["No problems."]
    table = tabulate_problems(warnings(300))
    assert len(table) == 201 and table[-1]["message"] == "… and 100 more: see the report."


def test_rows_that_were_never_read_have_no_description() -> None:
    assert describe_rows(None, None) == ""


def test_groups_and_times_of_splits_are_told_in_a_line_and_in_the_table() -> None:
    rows = {"train": 70, "validation": 10}
    lengths = {split: {"min": 1, "median": 2, "max": 3} for split in rows}
    report = {"rows": rows, "held_out": {"validation": 0.1}, "characters": lengths, "labels": {}, "problems": []}
    assert summarize_splits(report) == ""
    groups = {"groups": {"train": 1200, "validation": 3}, "without_group": {"train": 2, "validation": 0}}
    assert summarize_splits(report | {"split": groups}) == "groups: train 1,200, validation 3"
    assert "| validation | 10 | 10% | 3 | 0 |" in describe_rows(report | {"split": groups}, None)
    times = {"train": ["2026-01-01", "2026-03-01"], "validation": ["2026-03-08", "2026-03-14"]}
    by_time = report | {"split": {"times": times, "in_gap": {"train": 4, "validation": 0}}}
    told = "times: train 2026-01-01 to 2026-03-01, validation 2026-03-08 to 2026-03-14; 4 rows in a gap between them"
    assert summarize_splits(by_time) == told
    assert "| train | 70 |  | 2026-01-01 to 2026-03-01 | 4 |" in describe_rows(by_time, None)


def test_how_a_report_is_drawn_is_no_ingredient_of_rows_and_tokens() -> None:
    files = code_digests(["tasks.stages.load_data", "tasks.stages.tokenize"])
    assert "training/tokenization/encoder.py" in files and "training/evaluation/plots.py" not in files


def test_the_worst_errors_are_the_wrong_rows_with_most_confidence_of_all_splits(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    rows = [("test", n, "x" * 200_000, "a", "b" if n % 2 else "a", n / 100) for n in range(50)]
    rows.append(("validation", 0, "short", "a", "b", 0.4))
    write_samples(
        [dict(zip(("split", "row", "text", "label", "prediction", "probability"), row, strict=True)) for row in rows],
        tmp_path / "log" / "predictions_sample.csv",
    )
    table = find_worst_errors(tmp_path)
    assert [row["row"] for row in table[:6]] == ["49", "47", "45", "43", "41", "0"] and len(table) == 20
    assert table[5] == {**table[5], "split": "validation", "text": "short", "probability": "0.4"}
    assert table[0]["text"] == "x" * 499 + "…"


def test_a_score_is_reported_with_its_interval_if_it_has_one() -> None:
    assert format_score({"value": 0.83125, "low": 0.81331, "high": 0.84844}) == "0.8313 (0.813 to 0.848)"
    assert format_score({"value": 0.5, "low": None, "high": None}) == "0.5000"
    assert format_score({"value": None, "low": None, "high": None}) == "-"
    assert (
        format_score({"value": 0.5, "low": 0.4, "high": 0.6, "baseline": 0.45})
        == "0.5000 (0.400 to 0.600; baseline 0.450)"
    )
    assert format_score({"value": 0.5, "low": None, "high": None, "baseline": 0.45}) == "0.5000 (baseline 0.450)"


GROUPS = [
    group("war", 300, accuracy=0.75, log_loss=0.9),
    group("horror\n", 120, accuracy=0.5, log_loss=0.2),
    group("essay", 9, accuracy=0.1, log_loss=None),
]


def scores(folder: Path, groups: list[dict[str, Any]], name: str = "genre") -> Path:
    (folder / "slices.json").write_text(json.dumps({"validation": {name: groups}, "test": {name: groups[:1]}}))
    return folder


def judged_by(metric: str, metrics: Sequence[str] = ("accuracy", "f1", "log_loss"), **gate: Any) -> Recipe:
    return parse(
        {
            "name": "test",
            "task": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label", "test_size": 0.1},
            "model": {"source": "hub", "path": "me/model"},
            "evaluation": {"metrics": [*metrics], "splits": ["validation", "test"]},
            "release": {"gate": {"compare": metric, "split": "validation", **gate}},
        }
    )


def test_the_worst_group_of_each_slice_is_chosen_by_the_metric_that_compares_models(tmp_path: Path) -> None:
    assert find_worst_groups(judged_by("accuracy"), tmp_path) == {}
    found = scores(tmp_path, GROUPS)
    expected = "genre=horror� accuracy 0.5000 (0.450 to 0.550), 120 rows"
    assert find_worst_groups(judged_by("accuracy"), found) == {"genre": expected}
    expected = "genre=war log_loss 0.9000 (0.850 to 0.950), 300 rows"
    assert find_worst_groups(judged_by("log_loss"), found) == {"genre": expected}
    few = [group("essay", 9, accuracy=0.1), group("poem", 3, accuracy=0.2)]
    assert find_worst_groups(judged_by("log_loss"), scores(tmp_path, few))["genre"].startswith(
        "genre=essay accuracy 0.1000"
    )


def test_the_worst_label_is_chosen_by_a_metric_that_has_a_meaning_on_its_rows_or_not_at_all(tmp_path: Path) -> None:
    labels = [group("no", 90, f1=0.0, roc_auc=None, accuracy=0.9), group("yes", 30, f1=0.9, roc_auc=None, accuracy=0.6)]
    found = scores(tmp_path, labels, "label")
    expected = "label=yes accuracy 0.6000 (0.550 to 0.650), 30 rows"
    assert find_worst_groups(judged_by("f1", metrics=["f1", "accuracy"]), found) == {"label": expected}
    mine = [{**group, "metrics": {"mine": group["metrics"]["f1"]}} for group in labels]
    assert find_worst_groups(judged_by("f1"), scores(tmp_path, mine, "label"))["label"].startswith(
        "label=no mine 0.0000"
    )
    assert find_worst_groups(judged_by("f1"), scores(tmp_path, [group("no", 90, f1=0.0)], "label")) == {}


def test_groups_are_a_table_that_ends(tmp_path: Path) -> None:
    first, *_, last = tabulate_slices(scores(tmp_path, GROUPS))
    assert first == {"split": "validation", "slice": "genre", "group": "war", "rows": "300"} | {
        "accuracy": "0.7500 (0.700 to 0.800)",
        "log_loss": "0.9000 (0.850 to 0.950)",
    }
    assert (last["split"], last["group"]) == ("test", "war")
    table = tabulate_slices(scores(tmp_path, GROUPS * 100))
    assert len(table) == 201 and table[-1] == {"group": "… and 101 more: see score/slices.json."}


def test_mlflow_takes_the_names_of_all_groups_and_gets_the_largest(tmp_path: Path) -> None:
    odd = ["1-12 tokens", "日本", "", ".", "a/../b", "a/b", "a=b", "x" * 300, "a|b", "a\nb"]
    found = read_slice_metrics(scores(tmp_path, [group(name, 5, accuracy=0.5) for name in odd], "$/"))
    assert len(found) == len(odd) + 1
    for name in found:
        _validate_metric_name(f"score/{name}")
        assert len(name) < MAX_ENTITY_KEY_LENGTH - len("score/")
    assert format_group_name("x=a:b") == "x:a:b" and re.fullmatch("x:a_b_[0-9a-f]{8}", format_group_name("x=a=b"))
    plain = read_slice_metrics(scores(tmp_path, [group(f"g{n}", n, accuracy=n / 30, f1=None) for n in range(30)]))
    assert list(plain)[:2] == ["validation/genre:g29/accuracy", "validation/genre:g28/accuracy"] and len(plain) == 21


def test_an_error_without_a_message_is_named_by_its_type() -> None:
    assert first_line(ValueError("a: b\nc")) == "a: b" and first_line(OSError()) == "OSError"
