"""The dossier of a version that a run has registered."""

from __future__ import annotations

import csv
import json
import shutil
import zipfile
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from mlcroissant import Dataset

from flows.cli.main import main
from tests.flows.small import FinishedRun


@pytest.fixture
def version(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinishedRun:
    """The finished run, in a home of this test."""
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    return FinishedRun(home, finished.file, finished.result, finished.printed)


def test_the_dossier_of_a_version_is_written_again_in_the_same_bytes_also_from_mlflow_alone(
    version: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (tmp_path / f"{number}.zip" for number in range(3))
    assert main(["dossier", "small/1", "--out", str(first)]) == 0
    assert "sha256" in capsys.readouterr().out
    assert main(["dossier", "small@champion", "--out", str(second)]) == 0
    shutil.rmtree(version.home / "runs")
    assert main(["dossier", "small/1", "--out", str(third)]) == 0
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()


def test_the_files_of_a_dossier_are_valid_and_lead_to_the_rows_of_the_run(version: FinishedRun, tmp_path: Path) -> None:
    file, out = tmp_path / "small.zip", tmp_path / "small"
    assert main(["dossier", "small/1", "--out", str(file)]) == 0
    with zipfile.ZipFile(file) as archive:
        archive.extractall(out)
    folder = out / "small-1"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str((folder / "bom.cdx.json").read_text()) is None
    record = json.loads((folder / "lineage.json").read_text())
    weights = {
        one["name"] for one in json.loads((folder / "bom.cdx.json").read_text())["metadata"]["component"]["components"]
    }
    assert weights == {*record["model"]["files"]}

    dataset = Dataset(folder / "croissant.json")
    assert not dataset.metadata.ctx.issues.errors
    for rows in dataset.metadata.record_sets:
        with (version.file.parent / rows.name).open(newline="") as table:
            expected = [(row["text"], row["label"]) for row in csv.DictReader(table)]
        read = [tuple(value.decode() for value in row.values()) for row in dataset.records(rows.id)]
        assert read == expected
    assert {rows.name for rows in dataset.metadata.record_sets} == {"train.csv", "validation.csv"}

    events = [json.loads(line) for line in (folder / "openlineage.jsonl").read_text().splitlines()]
    stages = [stage["name"] for stage in version.result["stages"]]
    assert [event["job"]["name"] for event in events if event["eventType"] != "START"] == [
        *(f"small.{stage}" for stage in stages), "small",
    ]  # fmt: skip
    starts = {event["job"]["name"]: event["eventTime"] for event in events if event["eventType"] == "START"}
    assert starts["small.fit"] < starts["small.score"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("small", "write NAME/VERSION, such as small/1"),
        ("small/9", "'small' has no version '9'"),
    ],
)
def test_a_name_that_is_no_version_is_one_message(
    version: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert main(["dossier", name, "--out", str(tmp_path / "out.zip")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.zip").exists()
