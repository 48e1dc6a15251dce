"""The benchmarks: figures made from measurements, and the table that shows them with their budgets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import cold
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


def test_the_parts_of_a_cold_run_are_its_time_without_the_work_of_its_stages() -> None:
    runs = [
        cold.ColdRun(wall_s, before_s=4.0, after_s=0.5, stages_s={"fit": 7.0, "score": 2.0}, weights="")
        for wall_s in (14.0, 30.0, 13.75)
    ]
    total, *parts = cold.build_rows(runs, {"fit": 3.0, "score": 1.0})
    assert total.value == 10.0 and total.holds
    assert sum(float(part.value) for part in parts) == pytest.approx(total.value)
    assert {part.what: part.value for part in parts} == {
        "… before the first stage": 4.0,
        "… fit": 4.0,
        "… score": 1.0,
        "… between the stages": 0.5,
        "… after the last stage": 0.5,
    }


def test_the_memory_of_a_process_contains_what_it_has_written_and_an_ended_one_has_none() -> None:
    # A program of its own: pages that this process shares with other tests count as fewer when another one starts.
    program = "kept = bytearray(b'x') * 50_000_000; print(); input()"
    python = Path(sys.prefix) / "bin" / "python"
    with subprocess.Popen([python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        assert 45_000 < cold.read_pss_kb(writer.pid) < 100_000
        writer.communicate("\n")
    assert cold.read_pss_kb(writer.pid) == 0
