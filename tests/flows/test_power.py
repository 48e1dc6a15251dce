"""`finetune power`, and the plan's reasons why the gate can promote nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flows.cli.main import main
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_project

ASSUMED = "Only one of the two models is right on 10% of the rows (an assumption: "


def test_the_gain_that_the_stored_rows_find_is_shown_for_a_file_and_for_a_registered_model(
    finished: FinishedRun, tmp_path: Path
) -> None:
    shown = [
        finetune(finished.home, "power", name, "--json", str(tmp_path / "out.json")).stdout
        for name in (str(finished.file), "small")
    ]
    assert shown[0] == shown[1]
    head, assumed, found, *_ = shown[0].splitlines()
    assert head == "validation: 60 rows, 95% confidence" and assumed.startswith(ASSUMED)
    (gain,) = re.findall(r"^The gate finds a gain of (0\.\d{4}) in accuracy with a chance of 80 %\.$", found)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert f"{figures['detectable_gain']:.4f}" == gain and figures["obstacles"] == []
    assert [one["gain"] for one in figures["gains"]] == [0.005, 0.01, 0.02, 0.03, 0.05]
    assert figures["gains"][0]["rows"] > figures["gains"][-1]["rows"] > 60


def test_counted_comparisons_flips_and_few_rows_show_in_power_and_plan(finished: FinishedRun) -> None:
    gate = ["--set", "release.gate.control=all", "--set", "release.gate.flips.max_share=0.02"]
    shown = finetune(finished.home, "power", str(finished.file), *gate).stdout
    assert shown.startswith("validation: 60 rows, 97.8125% confidence, comparison 1 on these rows\n")
    assert "\nThe gate finds no gain with a chance of 80 %.\n" in shown
    obstacle = (
        "60 rows of validation replace no champion: release.gate.flips.max_share, 0.02, takes 190 rows without any "
        "flip at 97.8125% confidence (comparison 1 on these rows)."
    )
    assert f"\nwarning: {obstacle}\n" in shown
    plan = finetune(finished.home, "plan", str(finished.file), *gate, "--set", "release.gate.min_rows=61").stdout
    assert f"  gate: {obstacle}\n" in plan
    assert "  gate: 60 rows of validation promote no model: release.gate.min_rows is 61.\n" in plan
    later = finetune(finished.home, "power", str(finished.file), *gate[:2], "--comparison", "10000000", "--rows", "30")
    assert (
        "promote no model at 100% confidence (comparison 10,000,000 on these rows): it takes 43 at least."
        in later.stdout
    )
    assert "  gate: " not in finetune(finished.home, "plan", str(finished.file)).stdout


def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, home: Path, model_unchecked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_project(tmp_path / "project"))
    assert main(["power", file]) == 2
    assert capsys.readouterr().err == (
        "--rows: the rows are not stored yet: run the recipe first, or give their number, such as --rows 1000.\n"
    )
    assert main(["power", file, "--rows", "1000", "--differing", "0.05", "--gain", "0.02"]) == 0
    assert "on 5% of the rows (as --differing says)" in capsys.readouterr().out
    assert main(["power", file, "--set", "release.gate.compare=f1", "--set", "release.gate.margin=0.1"]) == 2
    compare, margin = capsys.readouterr().err.splitlines()
    assert compare.startswith("release.gate.compare: the power of the comparison by f1 ")
    assert margin.startswith("release.gate.margin: the power with a margin, 0.1, is not computed")
