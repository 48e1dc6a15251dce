"""The benchmarks' table: budgets judged and shown. What is measured is no test's business."""

from __future__ import annotations

from tests.benchmarks.table import Row, markdown


def test_a_figure_keeps_to_its_budget_up_to_the_limit_itself() -> None:
    assert Row("a", 0.9, "", least=0.9).holds and Row("b", 2.0, "", most=2.0).holds
    assert Row("c", 0.89, "", least=0.9).holds is False and Row("d", 2.1, "", most=2.0).holds is False
    assert Row("e", 5.0, "").holds is None


def test_the_table_has_a_line_a_figure_with_its_unit_and_its_budget() -> None:
    rows = [
        Row("slow", 15.27, "median of 3", unit="s", most=15.0),
        Row("shares", "a 40 %, b 60 %", "timers"),
        Row("size", 1234.5, "x|y", unit="MiB"),
    ]
    assert markdown(rows).splitlines() == [
        "| what | measured | budget | holds | how |",
        "|---|---|---|---|---|",
        "| slow | 15.3 s | ≤ 15 s | **no** | median of 3 |",
        "| shares | a 40 %, b 60 % |  |  | timers |",
        "| size | 1,234 MiB |  |  | x/y |",
    ]
