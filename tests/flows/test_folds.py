"""Folds in a run: after the recipe's own training, from the same rows, tokens and base model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.arrow import read_arrow
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, artifact_of, environment, states
from tests.fork_server import PAUSE
from training.jobs.protocol import EVENTS, read_events, sha256

pytestmark = pytest.mark.slow

FOLDS = ("--set", "evaluation.folds=3")
OF_FOLDS = [f"{name}_fold_{fold}" for fold in (1, 2, 3) for name in ("fit", "predict")]


@pytest.fixture(scope="module")
def folded(finished: FinishedRun, server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The shared run, gone on with for three folds."""
    folder = tmp_path_factory.mktemp("folded")
    home, out = shutil.copytree(finished.home, folder / "home", symlinks=True), folder / "out.json"
    run = finetune(home, "run", str(finished.file), *FOLDS, "--json", str(out), **server)
    assert run.returncode == 0, run.stdout + run.stderr
    return FinishedRun(home, finished.file, json.loads(out.read_text()), run.stdout)


def bytes_of(home: Path, result: dict[str, Any]) -> dict[str, str]:
    """What the folds have made."""
    files = {name: artifact_of(home, result, name) / "model/model.safetensors" for name in OF_FOLDS[::2]}
    files["out_of_fold"] = artifact_of(home, result, "out_of_fold") / "train.parquet"
    files["score_folds"] = artifact_of(home, result, "score_folds") / "metrics.json"
    return {name: sha256(file) for name, file in files.items()}


def test_a_run_with_folds_trains_only_these_and_predicts_every_training_row(folded: FinishedRun) -> None:
    found = {stage["name"]: stage["state"] for stage in folded.result["stages"]}
    made = {name for name, state in found.items() if state == "ran"}
    assert made >= {"assign_folds", *OF_FOLDS, "out_of_fold", "score_folds"}
    assert {found[name] for name in ("load_data", "load_model", "tokenize", "fit", "predict", "score")} == {"cached"}

    rows = read_arrow(artifact_of(folded.home, folded.result, "load_data") / "train.arrow")
    predicted = pq.read_table(artifact_of(folded.home, folded.result, "out_of_fold") / "train.parquet")
    usual = pq.read_schema(artifact_of(folded.home, folded.result, "predict") / "validation.parquet")
    assert predicted.schema.equals(usual)
    assert predicted["row"].to_pylist() == list(range(len(rows))) and predicted["label"].equals(rows["label"])

    accuracy = folded.result["out_of_fold"]["accuracy"]
    right = [
        one == other
        for one, other in zip(*(predicted[name].to_pylist() for name in ("label", "prediction")), strict=True)
    ]
    assert accuracy["value"] == pytest.approx(sum(right) / len(right))
    assert 0.7 < accuracy["low"] <= accuracy["value"] <= accuracy["high"] <= 1
    assert f"Out of fold: accuracy {accuracy['value']:.4f} (" in folded.printed


def test_the_trainings_read_what_the_training_on_all_rows_reads_and_the_folds(folded: FinishedRun) -> None:
    def inputs(name: str) -> dict[str, Any]:
        return dict(json.loads((artifact_of(folded.home, folded.result, name) / "inputs.json").read_text()))

    of_fit = inputs("fit")
    for fold in (1, 2, 3):
        of_fold = inputs(f"fit_fold_{fold}")
        assert of_fold.items() >= of_fit.items()
        assert (
            of_fold.keys() - of_fit.keys() == {"fold", "upstream.assign_folds/folds.arrow"} and of_fold["fold"] == fold
        )


def test_folds_at_once_end_with_the_same_bytes(
    finished: FinishedRun, folded: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home, out = shutil.copytree(finished.home, tmp_path / "home", symlinks=True), tmp_path / "out.json"
    at_once = ("--set", "evaluation.parallel_folds=3")
    run = finetune(home, "run", str(finished.file), *FOLDS, *at_once, "--json", str(out), **server)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    began = {stage["name"]: number for number, stage in enumerate(result["stages"])}
    assert began["out_of_fold"] > max(began[name] for name in OF_FOLDS)
    assert bytes_of(home, result) == bytes_of(folded.home, folded.result)


def test_plan_names_the_trainings_and_what_they_share_and_show_the_metrics(
    folded: FinishedRun, server: dict[str, str]
) -> None:
    recipe = str(folded.file)
    assert "Nothing changed since" in finetune(folded.home, "run", recipe, *FOLDS, **server).stdout
    plan = finetune(folded.home, "plan", recipe, *FOLDS, **server).stdout
    assert "fit_fold_2       cached" in plan
    assert "folds: 3 trainings share load_data, load_model, tokenize with fit; all are cached" in plan
    more = finetune(folded.home, "plan", recipe, "--set", "evaluation.folds=4", **server).stdout
    assert "fit              cached" in more and "assign_folds     will run" in more
    shown = finetune(folded.home, "show", "small", **server).stdout
    assert "  out of fold   accuracy " in shown


@pytest.mark.drill
def test_folds_that_are_killed_three_times_end_with_the_bytes_of_folds_that_were_not(
    finished: FinishedRun, folded: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home, out = shutil.copytree(finished.home, tmp_path / "home", symlinks=True), tmp_path / "out.json"
    words = [sys.executable, "-m", "tests.flows.forked", "run", str(finished.file), *FOLDS, "--json", str(out)]
    env = environment(home, **{PAUSE: "0.06"}, **server)
    resumed = set()
    for victim in ("flow", "training", "flow"):
        run = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        job = wait_for_new_checkpoint(home, run)
        resumed.add(job.name)
        if victim == "training":  # it is started again by the run, which is killed in a later fold
            (*_, started) = read_events(job / EVENTS, 0, ["started"])[0]
            os.kill(started["pid"], signal.SIGKILL)
            while job.exists() and run.poll() is None:
                time.sleep(0.02)
            wait_for_new_checkpoint(home, run)
        run.kill()
        run.communicate()
    last = finetune(home, "run", str(finished.file), *FOLDS, "--json", str(out), **server)
    assert last.returncode == 0, last.stdout + last.stderr
    assert "resumed" in states(out).values()
    result = json.loads(out.read_text())
    assert bytes_of(home, result) == bytes_of(folded.home, folded.result)
    assert result["out_of_fold"] == folded.result["out_of_fold"]


def wait_for_new_checkpoint(home: Path, run: subprocess.Popen[str]) -> Path:
    """The job of a training that has written a checkpoint since the call."""
    before, deadline = {*home.glob("jobs/*/checkpoints/checkpoint-*")}, time.monotonic() + 120
    while not (new := {*home.glob("jobs/*/checkpoints/checkpoint-*")} - before):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return min(new).parent.parent
