"""Rows that a model must have right: read before training, predicted after it, and judged by the gate."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from flows.cli.main import main
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, states, write_project

ROWS = [
    ("the film was superb", "pos", "a customer complained"),
    ("the actor was grim", "pos", "the label of a liar"),
    ("the plot was lovely", "neg", ""),
    ("the plot was awful", "neg", None),
]


def write(file: Path, rows: list[tuple[str, ...]], head: tuple[str, ...] = ("text", "label", "reason")) -> list[str]:
    """Writes the rows; gives the arguments of a command."""
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([head, *rows])
    return ["--set", f"release.gate.must_hold.path={file}"]


@pytest.mark.slow
def test_a_model_with_a_wrong_row_is_rejected_and_the_rest_of_the_run_is_cached(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home, out = shutil.copytree(finished.home, tmp_path / "home", symlinks=True), tmp_path / "out.json"
    given = write(tmp_path / "must-hold.csv", ROWS)
    run = finetune(home, "run", str(finished.file), *given, "--json", str(out), **server)
    assert run.returncode == 0, run.stdout + run.stderr
    done, verdict = states(out), json.loads(out.read_text())["verdict"]
    assert done["fit"] == done["predict"] == done["score"] == "cached" and done["must_hold"] == "ran"
    assert verdict["decision"] == "reject" and verdict["reason"] == (
        "it misses must_hold.share 0.5 < 1; of 2 rows that must hold, it has 1 wrong: 'the actor was grim' is 'neg' "
        "and must be 'pos': the label of a liar."
    )
    assert [row["row"] for row in verdict["must_hold"]["wrong"]] == [1, 2]
    assert "the label of a liar" in run.stdout
    again = finetune(home, "run", str(finished.file), *given, "--set", "release.gate.must_hold.min_share=0.5", **server)
    assert "  must_hold        cached" in again.stdout and "must_hold.share" in again.stdout


@pytest.mark.parametrize(
    ("rows", "head", "message"),
    [
        ([("fine film", "neutral", "why")], ("text", "label", "reason"), "'neutral'"),
        ([("", "pos", "why")], ("text", "label", "reason"), "row 2: has no text"),
        ([("fine film", "pos")], ("texts", "label"), "'text'"),
        (
            [("fine film", "pos", "x" * 300)],
            ("text", "label", "reason"),
            "release.gate.must_hold.reason: column 'reason' ",
        ),
        ([], ("text", "label", "reason"), "no rows"),
        (None, (), "release.gate.must_hold.path: "),
    ],
)
def test_mistakes_in_these_rows_are_found_before_training(
    rows: list[tuple[str, ...]] | None,
    head: tuple[str, ...],
    message: str,
    tmp_path: Path,
    home: Path,
    model_unchecked: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "must-hold.csv"
    given = ["--set", f"release.gate.must_hold.path={file}"] if rows is None else write(file, rows, head)
    assert main(["check", str(write_project(tmp_path / "project")), *given]) == 2
    assert message in capsys.readouterr().out


def test_rows_of_one_label_without_reasons_are_enough(tmp_path: Path, home: Path, model_unchecked: None) -> None:
    project = write_project(tmp_path / "project")
    for rows, head in (
        ([("fine film", "pos")], ("text", "label")),
        ([("fine film", "pos", "")], ("text", "label", "reason")),
    ):
        assert main(["check", str(project), *write(tmp_path / "must-hold.csv", rows, head)]) == 0
