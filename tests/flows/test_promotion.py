"""Promotion in whole runs: the champion that a retrain is compared with, and the records of the verdict."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tasks.cache.results import PinnedVersion
from tasks.cache.stage import Work
from tasks.registry.pinned_versions import find_folders
from tasks.tracking.connection import connect
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_project
from training.problems import UserError


def write_noisy_project(folder: Path) -> Path:
    """The small recipe with every second label of train wrong."""
    file = write_project(folder)
    rows = list(csv.reader((folder / "train.csv").read_text().splitlines()))
    for row in rows[2::2]:
        row[1] = {"pos": "neg", "neg": "pos"}[row[1]]
    with (folder / "train.csv").open("w", newline="") as out:
        csv.writer(out).writerows(rows)
    return file


def predictions(home: Path, result: dict[str, Any], stage: str) -> bytes:
    """The predictions of a run's stage, as bytes."""
    (artifact,) = (row["artifact"] for row in result["stages"] if row["name"] == stage)
    return (home / artifact / "validation.parquet").read_bytes()


def aliases() -> dict[str, int]:
    return {alias: int(version) for alias, version in connect().get_registered_model("small").aliases.items()}


def assert_verdict_tracked(result: dict[str, Any]) -> None:
    """The verdict of a run, in MLflow and as a table in Prefect."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

    verdict, run = result["verdict"], connect().get_run(result["mlflow_run_id"])
    assert (run.data.tags["gate.decision"], run.data.tags["gate.reason"]) == (verdict["decision"], verdict["reason"])
    assert run.data.metrics["compare/gain"] == verdict["comparison"]["gain"]
    files = {file.path for top in ("gate", "compare") for file in connect().list_artifacts(run.info.run_id, top)}
    assert {"gate/verdict.json", "compare/comparison.json", "compare/disagreements.csv"} <= files
    with get_client(sync_client=True) as client:
        of_this_run = ArtifactFilterFlowRunId(any_=[result["flow_run_id"]])
        chosen = ArtifactFilter(flow_run_id=of_this_run, key=ArtifactFilterKey(any_=["finetune-verdict"]))
        (table,) = client.read_artifacts(artifact_filter=chosen)
    assert len(json.loads(table.data)) == len(verdict["checks"])
    assert verdict["reason"] in table.description
    assert f"| {verdict['comparison']['champion']} | gain |" in table.description


def assert_groups_tracked(result: dict[str, Any], printed: str) -> None:
    """How good the model is on the groups of rows, and by which floors it was judged: on paper and in MLflow."""
    checked = {check["figure"]: check["value"] for check in result["verdict"]["checks"]}
    assert list(checked) == ["validation.label=neg.accuracy", "validation.label=pos.accuracy"]
    worst = min(checked, key=lambda figure: checked[figure]).split(".")[1]
    first, second = re.findall(r"^ {40}slices: worst (.+)$", printed, re.MULTILINE)
    assert re.fullmatch(rf"{worst} accuracy 0\.\d{{4}} \(0\.\d{{3}} to [01]\.\d{{3}}\), (27|33) rows", first)
    assert re.match(r"length_bucket=\d+-\d+ tokens accuracy ", second)
    run = connect().get_run(result["mlflow_run_id"])
    for figure, value in checked.items():
        name = figure.replace(".", "/").replace("=", ":")
        assert run.data.metrics[f"score/{name}"] == run.data.metrics[f"gate/{name}"] == value
    files = {file.path for file in connect().list_artifacts(run.info.run_id, "score")}
    assert {f"score/slices_validation_{name}.png" for name in ("label", "length_bucket")} | {
        "score/slices.json"
    } < files


@pytest.mark.drill
def test_a_noisy_retrain_is_kept_for_a_reason_and_a_better_model_is_promoted(
    finished: FinishedRun,
    server: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, out = shutil.copytree(finished.home, tmp_path / "home", symlinks=True), tmp_path / "out.json"
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    noisy = write_noisy_project(tmp_path / "project")
    weaker = ["--set", "release.gate.minimum={}", "--set", "training.num_train_epochs=5"]
    weaker += [
        "--set",
        "evaluation.slices=[label, length_bucket]",
        "--set",
        "release.gate.floors={label: {accuracy: 0}}",
    ]

    run = finetune(home, "run", str(noisy), *weaker, "--json", str(out), "--require-promotion", **server)
    assert run.returncode == 1 and "the model was not promoted" in run.stderr, run.stderr
    kept = json.loads(out.read_text())
    verdict = kept["verdict"]
    assert (kept["state"], verdict["decision"], kept["model"]["alias"]) == ("completed", "keep", "challenger")
    assert "of small/1 on the same 60 rows of validation: " in verdict["reason"]
    assert verdict["reason"].endswith("that is not better.") and verdict["reason"] in run.stdout
    assert aliases() == {"champion": 1, "challenger": 2}
    assert predictions(home, kept, "predict_champion") == predictions(finished.home, finished.result, "predict")
    assert_verdict_tracked(kept)
    assert_groups_tracked(kept, run.stdout)

    # It is promoted by hand, and its local files are deleted: they are fetched from MLflow.
    connect().set_registered_model_alias("small", "champion", "2")
    (artifact,) = (home / row["artifact"] for row in kept["stages"] if row["name"] == "fit")
    shutil.rmtree(artifact)
    run = finetune(home, "run", str(finished.file), "--json", str(out), "--require-promotion", **server)
    assert run.returncode == 0, run.stderr
    better = json.loads(out.read_text())
    assert (better["verdict"]["decision"], better["model"]["registered"]) == ("promote", "small/1")
    assert "predict_champion: small/2 is fetched from MLflow" in run.stderr and "%|" not in run.stderr
    assert aliases() == {"champion": 1, "challenger": 2}
    assert predictions(home, better, "predict_champion") == predictions(home, kept, "predict")
    assert_verdict_tracked(better)

    # The champion of then is remembered: the model is not compared with itself now that it has the alias.
    assert main(["run", str(finished.file), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Nothing changed" in printed and better["verdict"]["reason"] in printed
    unchanged = json.loads(out.read_text())
    assert unchanged["verdict"] == better["verdict"]
    # Its alias is the present one, also after a move by hand.
    assert "Verdict of that run: promote" in printed and unchanged["model"]["alias"] == "champion"
    assert printed.endswith(
        'version 1, champion\nNext:\n  finetune predict small "some text"\n  finetune serve   small\n'
    )
    assert main(["rollback", "small"]) == 0
    capsys.readouterr()
    assert main(["run", str(finished.file), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Registered: small version 1\nNext:\n" in printed and "  finetune serve   small/1\n" in printed
    assert printed.endswith("  finetune promote small 1    # makes it the champion\n")
    assert json.loads(out.read_text())["model"]["alias"] is None
    run = finetune(home, "run", str(finished.file), "--require-promotion", **server)
    assert run.returncode == 1 and "the model was not promoted" in run.stderr, run.stderr
    assert "was champion until" in run.stderr and aliases() == {"champion": 2}
    capsys.readouterr()
    assert main(["plan", str(finished.file), "--set", "training.learning_rate=1e-3"]) == 0
    planned = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert ["compare", "may", "run", "where there is a champion or a baseline"] in planned


def test_of_a_champion_in_mlflow_weights_and_tokenizer_are_fetched_and_nothing_that_could_be_run(
    finished: FinishedRun, home: Path, tmp_path: Path
) -> None:
    home.mkdir(mode=0o700)
    shutil.copy(finished.home / "mlflow.db", home)
    there = {"model/config.json", "model/model.safetensors", "components/tokenizer/tokenizer.json"}
    for name in there | {"model/pytorch_model.bin", "model/modeling_mine.py", "components/tokenizer/mine.py"}:
        file = tmp_path / "logged" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    made = connect().create_model_version("small", source=(tmp_path / "logged").as_uri())
    champion = PinnedVersion(name="small", version=str(made.version), model="", max_length=8)
    work = Work(key="k", out=tmp_path, run="run")
    folders = find_folders(work, champion, "release.registry")
    found = {path.relative_to(work.job / "fetched").as_posix() for path in work.job.rglob("*.*") if path.is_file()}
    assert found == {"model/config.json", "model/model.safetensors", "tokenizer/tokenizer.json"}
    assert folders == {part: work.job / "fetched" / part for part in ("model", "tokenizer")}

    os.remove(tmp_path / "logged/model/model.safetensors")
    with pytest.raises(UserError, match=rf"champion small/{made.version} has no whole model in safetensors"):
        find_folders(Work(key="other", out=tmp_path, run="run"), champion, "release.registry")


def test_promotion_cannot_be_required_of_a_recipe_without_a_registry(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    assert main(["run", str(finished.file), "--set", "release.registry=null", "--require-promotion"]) == 2
    assert "--require-promotion: without release.registry, no model is promoted" in capsys.readouterr().err
