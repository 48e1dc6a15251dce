"""`finetune labels`: from out-of-fold predictions to a file of decisions, and back into the rows."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flows.cli.main import main
from tasks.cache import store
from tasks.registry.lineage import find_record
from tasks.tracking.connection import connect
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun
from tests.made import artifact
from tests.training import tiny

WRONG = 12


@pytest.fixture
def with_folds(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose run has out-of-fold predictions: of the first WRONG rows, the model is sure of the other label."""
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    record = find_record("small")
    key = next(one["key"] for one in record["stages"] if one["name"] == "load_data")
    rows = store.find("load_data", key)
    assert rows is not None
    labels = np.array(pa.ipc.open_file(rows.path / "train.arrow").read_all()["label"])
    truth = np.where(np.arange(len(labels)) < WRONG, 1 - labels, labels)
    logits = np.zeros((len(labels), 2), np.float32)
    logits[np.arange(len(labels)), truth] = np.abs(np.random.default_rng(0).normal(3, 2, len(labels))) + 0.2
    logits[np.arange(WRONG), truth[:WRONG]] = np.linspace(6, 4, WRONG)
    file = tmp_path / "train.parquet"
    tiny.write_predictions(file, labels, logits, np.full(len(labels), 3, np.int32))
    made = artifact("out_of_fold", {"train.parquet": file.read_bytes()}, {"rows": len(labels)})
    path = home / "runs" / record["run"]["flow_run_id"] / "lineage.json"
    stages = [*record["stages"], {**record["stages"][0], "name": "out_of_fold", "key": made.key}]
    path.write_text(json.dumps(record | {"stages": stages}))
    return home


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8-sig") as opened:
        return list(csv.DictReader(opened))


def summary_of(result: Mapping[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["state"] for stage in result["stages"]}


@pytest.mark.slow
def test_a_list_is_decided_on_and_its_decisions_change_the_rows_of_train(
    finished: FinishedRun, with_folds: Path, server: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    run = finetune(with_folds, "labels", "small", "--out", "review.csv", "--json", str(out), **server)
    assert run.returncode == 0, run.stdout + run.stderr
    result, lines = json.loads(out.read_text()), read(tmp_path / "review.csv")
    report = result["labels"]
    assert report["suspects"] == len(lines) and report["share"]["low"] > 0.5
    assert f"{report['suspects']} of 240 labels are suspects" in run.stdout.replace("\n  ", " ")
    assert lines[0]["text"][:20] in run.stdout and "set data.corrections: review.csv" in run.stdout
    assert summary_of(result) == {"list_labels": "ran", "log_labels": "ran"}

    run_id = find_record("small")["run"]["mlflow_run_id"]
    logged = {file.path for file in connect().list_artifacts(run_id, "labels")}
    assert logged == {"labels/labels.json", "labels/review.csv"}

    lines[0]["decision"], lines[1]["decision"], lines[2]["decision"] = lines[0]["suggestion"], "drop", "keep"
    with (tmp_path / "review.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [*lines[0]], delimiter=";")
        table.writeheader()
        table.writerows(lines)
    given = ["--set", f"data.corrections={tmp_path / 'review.csv'}"]
    checked = finetune(with_folds, "check", str(finished.file), *given, **server)
    assert "labels of train: 1 corrected, 1 dropped, 1 kept, 0 already right" in checked.stdout, checked.stdout
    planned = finetune(with_folds, "plan", str(finished.file), *given, **server)
    assert "load_data        will run" in planned.stdout and "review.csv none →" in planned.stdout, planned.stdout


@pytest.mark.slow
def test_a_second_list_is_cached_keeps_decisions_and_never_overwrites_a_file(
    with_folds: Path, server: dict[str, str], tmp_path: Path
) -> None:
    first = finetune(with_folds, "labels", "small/1", **server)
    assert first.returncode == 0 and (tmp_path / "small-labels.csv").is_file()
    refused = finetune(with_folds, "labels", "small/1", **server)
    assert refused.returncode == 2 and "--out: 'small-labels.csv' exists, and may hold decisions" in refused.stderr
    out = tmp_path / "out.json"
    again = finetune(with_folds, "labels", "small/1", "--out", "b.csv", "--json", str(out), **server)
    assert again.returncode == 0, again.stderr
    assert summary_of(json.loads(out.read_text()))["list_labels"] == "cached"
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "small-labels.csv").read_bytes()


@pytest.mark.slow
def test_labels_are_compared_with_those_of_another_source(
    finished: FinishedRun, with_folds: Path, server: dict[str, str], tmp_path: Path
) -> None:
    with (finished.file.parent / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "second.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "second"])
        table.writerows([row["text"], "pos" if number < 30 else row["label"]] for number, row in enumerate(rows))
    out = tmp_path / "out.json"
    given = ["--against", str(tmp_path / "second.csv"), "--against-label", "second", "--json", str(out)]
    run = finetune(with_folds, "labels", "small", *given, **server)
    assert run.returncode == 0, run.stdout + run.stderr
    differing = sum(row["label"] == "neg" for row in rows[:30])
    assert json.loads(out.read_text())["labels"]["differing"] == differing
    assert f"{differing} rows with another label in the other source." in run.stdout
    wrong = finetune(with_folds, "labels", "small", "--against", "nowhere.csv", "--out", "c.csv", **server)
    assert wrong.returncode == 2 and "--against" in wrong.stderr


def test_a_run_without_folds_says_what_to_add(
    finished: FinishedRun, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finetune(finished.home, "labels", "small", **server)
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert "evaluation.folds: small has no predictions" in run.stderr and "add `evaluation: {folds: 5}`" in run.stderr


def test_the_options_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["labels", "--help"])
    assert "--out FILE" in capsys.readouterr().out
