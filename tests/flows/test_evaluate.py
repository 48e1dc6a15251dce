"""`finetune evaluate`: a registered version on rows whose labels arrived after its release."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.cli.main import main
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_rows
from tests.s3 import KEYS, S3
from tests.tasks.shared import s3
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

__all__ = ["s3"]


@pytest.fixture
def own_home(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the home in which the small recipe ran."""
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    return home


def evaluate(home: Path, *paths: Path | str, **more: str) -> tuple[dict[str, Any], str]:
    """The result of the command, and its output."""
    out = home.parent / "evaluation.json"
    run = finetune(home, "evaluate", "small", "--input", *map(str, paths), "--json", str(out), **more)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(out.read_text()), run.stdout


def swap_labels(file: Path, out: Path) -> None:
    """The rows with each label in the other's place: labels that changed their meaning."""
    with file.open(newline="") as source, out.open("w", newline="") as target:
        table = csv.writer(target)
        for number, row in enumerate(csv.reader(source)):
            table.writerow(row if number == 0 else [row[0], {"pos": "neg", "neg": "pos"}[row[1]], *row[2:]])


def test_the_rows_of_the_registration_have_the_promised_figures_without_a_difference(
    finished: FinishedRun, own_home: Path, server: dict[str, str], s3: S3
) -> None:
    url = s3.put("validation.csv", (finished.file.parent / "validation.csv").read_bytes())
    result, printed = evaluate(own_home, url, **server, **s3.environment(), **KEYS)
    found, expected = result["evaluation"], finished.result["metrics"]["validation"]
    assert found["rows"] == found["shared_rows"] == 60 and found["below"] == []
    for name, score in expected.items():
        assert {end: found["metrics"][name][end] for end in ("value", "low", "high")} == {
            end: score[end] for end in ("value", "low", "high")
        }
        assert all(abs(value) < 1e-9 for value in found["differences"][name].values())
    assert "60 of them also in validation" in printed
    assert printed.splitlines()[-2].endswith("finetune rollback small")
    assert printed.splitlines()[-1].endswith("prefect deployment run retrain/small")


def test_figures_below_the_gate_are_an_event_and_all_are_the_versions_history(
    finished: FinishedRun, own_home: Path, tmp_path: Path, server: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "monday.csv", 80, seed=5)
    swap_labels(tmp_path / "monday.csv", tmp_path / "swapped.csv")
    good, _ = evaluate(own_home, tmp_path / "monday.csv", **server)
    bad, printed = evaluate(own_home, tmp_path / "swapped.csv", **server)
    accuracy = good["evaluation"]["metrics"]["accuracy"]["value"]
    assert bad["evaluation"]["metrics"]["accuracy"]["value"] == pytest.approx(1 - accuracy)
    assert bad["evaluation"]["below"] == [f"accuracy {1 - accuracy:.4g} < 0.5"]
    assert bad["evaluation"]["differences"]["accuracy"]["high"] < 0
    assert "Outside of the gate's bounds: accuracy" in printed
    evaluate(own_home, tmp_path / "monday.csv", **server)  # the same rows again are the same evaluation
    client = MlflowClient(f"sqlite:///{own_home / 'mlflow.db'}")
    version = client.get_model_version("small", "1")
    history = json.loads(version.tags["finetune.evaluations"])
    assert sorted(entry["number"] for entry in history) == [1, 2]
    steps = {metric.step for metric in client.get_metric_history(version.run_id, "evaluated/accuracy")}
    assert steps == {1, 2}
    assert main(["show", "small/1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "evaluation 2" in shown and "outside of the gate's bounds: accuracy" in shown
    assert str(client.get_model_version_by_alias("small", "champion").version) == "1"

    from prefect.client.orchestration import get_client

    def stored() -> list[dict[str, Any]]:
        with get_client(sync_client=True) as client:
            answer = client._client.post("/events/filter", json={"filter": {"event": {"name": ["finetune.evaluated"]}}})
        runs = {good["flow_run_id"], bad["flow_run_id"]}
        return [event for event in answer.json()["events"] if event["payload"]["flow_run_id"] in runs]

    wait_until(lambda: bool(stored()), 30)
    (event,) = stored()
    assert event["payload"]["flow_run_id"] == bad["flow_run_id"] and event["payload"]["version"] == "small/1"


@pytest.mark.parametrize("rows", [1, 3])
def test_a_few_rows_of_one_label_are_evaluated_whole_and_read_as_an_option_says(
    own_home: Path, tmp_path: Path, server: dict[str, str], rows: int
) -> None:
    (tmp_path / "rows.csv").write_text("text;label\n" + "".join(f"good film {place};pos\n" for place in range(rows)))
    out = tmp_path / "out.json"
    options = ["--input", str(tmp_path / "rows.csv"), "--set", "data.delimiter=;", "--json", str(out)]
    run = finetune(own_home, "evaluate", "small", *options, **server)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(out.read_text(), parse_constant=pytest.fail)["evaluation"]
    assert found["rows"] == rows and found["metrics"]["accuracy"]["value"] == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("text,label\ngood film,pos\nbad film,maybe\n", "maybe"),
        ("review,label\ngood film,pos\n", "has no column 'text'"),
        ("text\ngood film\n", "has no column 'label'"),
        ("text,label\n", "no rows"),
    ],
)
def test_rows_that_cannot_be_evaluated_are_one_message(
    rows: str, message: str, own_home: Path, tmp_path: Path, server: dict[str, str]
) -> None:
    (tmp_path / "rows.csv").write_text(rows)
    run = finetune(own_home, "evaluate", "small", "--input", str(tmp_path / "rows.csv"), **server)
    assert run.returncode == 2 and message in run.stderr and "Traceback" not in run.stderr, run.stderr
    client = MlflowClient(f"sqlite:///{own_home / 'mlflow.db'}")
    assert "finetune.evaluations" not in client.get_model_version("small", "1").tags


def test_later_rows_are_in_the_groups_of_the_recipe_or_independent_with_a_warning(
    finished: FinishedRun, own_home: Path, tmp_path: Path, server: dict[str, str]
) -> None:
    given = ["--set", "data.split={by: group, column: genre}", "--set", "release.registry=grouped"]
    run = finetune(own_home, "run", str(finished.file), *given, **server)
    assert run.returncode == 0, run.stdout + run.stderr
    write_rows(tmp_path / "with.csv", 80, seed=5)
    with (tmp_path / "with.csv").open(newline="") as file:
        lines = [
            ["pos" if cell == "neg" and n < 20 else cell for cell in row] for n, row in enumerate(csv.reader(file))
        ]
    for name, columns in (("with", 3), ("without", 2)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(row[:columns] for row in lines)
    found = {}
    for name in ("with", "without"):
        out, rows = tmp_path / f"{name}.json", tmp_path / f"{name}.csv"
        run = finetune(own_home, "evaluate", "grouped/1", "--input", str(rows), "--json", str(out), **server)
        assert run.returncode == 0, run.stdout + run.stderr
        found[name] = json.loads(out.read_text())["evaluation"]
        has_warning = "without.csv has no column 'genre'" in run.stderr and "taken to be independent" in run.stderr
        assert has_warning == (name == "without"), run.stderr
        assert (": 80 rows in 3 groups." in run.stdout) == (name == "with"), run.stdout
    assert (found["with"]["groups"], found["without"]["groups"]) == (3, None)
    first, second = (one["metrics"]["accuracy"] for one in found.values())
    assert first["value"] == second["value"] and first["low"] != second["low"]


def test_folders_within_the_folder_are_not_read_and_named_in_a_warning(
    own_home: Path, tmp_path: Path, server: dict[str, str]
) -> None:
    (tmp_path / "rows" / "inner").mkdir(parents=True)
    for file in ("rows/one.csv", "rows/inner/two.csv"):
        (tmp_path / file).write_text("text,label\ngood film,pos\n")
    run = finetune(own_home, "evaluate", "small", "--input", str(tmp_path / "rows"), **server)
    assert run.returncode == 0 and ": 1 row" in run.stdout and "inner" in run.stderr, run.stdout + run.stderr


def test_texts_alone_have_no_labels_to_evaluate(own_home: Path, tmp_path: Path, server: dict[str, str]) -> None:
    (tmp_path / "rows.txt").write_text("good film\n")
    run = finetune(own_home, "evaluate", "small", "--input", str(tmp_path / "rows.txt"), **server)
    assert run.returncode == 2 and run.stderr.startswith(f"--input: {tmp_path / 'rows.txt'} holds a text a line")
    assert "choose from .csv" in run.stderr
