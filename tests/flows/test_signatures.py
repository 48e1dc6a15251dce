"""Signatures of versions, by the commands of people."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.cli.main import main
from tasks.registry.lineage import find_version
from tasks.registry.reproduction import require_signed
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_rows


@pytest.mark.slow
def test_a_registered_version_is_signed_and_stays_usable_after_a_report_of_drift_and_a_changed_byte_is_refused(
    finished: FinishedRun,
    server: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = copy_home(finished, tmp_path / "home")
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    write_rows(tmp_path / "new.csv", 60, seed=3)
    drift = finetune(home, "drift", "small", "--set", "min_rows=50", "--input", str(tmp_path / "new.csv"), **server)
    assert drift.returncode == 0, drift.stdout + drift.stderr
    assert main(["verify", "small"]) == 0
    assert "as signed" in capsys.readouterr().out
    predict = ["predict", "small", "--input", str(tmp_path / "new.csv"), "--output"]
    first = finetune(home, *predict, str(tmp_path / "first.csv"), **server)
    assert first.returncode == 0, first.stderr

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    config = local(client.get_model_version_download_uri("small", "1")) / "model" / "config.json"
    shutil.rmtree(home / "artifacts" / "fit")  # as a home that did not train it
    config.write_bytes(config.read_bytes().replace(b" ", b"\t", 1))
    write_rows(tmp_path / "new.csv", 60, seed=4)  # the former are predicted already
    refused = finetune(home, *predict, str(tmp_path / "second.csv"), **server)
    assert refused.returncode == 2 and "config.json has changed since it was signed" in refused.stderr
    assert not (tmp_path / "second.csv").exists() and main(["verify", "small"]) == 1
    assert "config.json has changed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_version_whose_files_changed_in_mlflow_is_restored_by_a_run_of_its_recipe(
    finished: FinishedRun,
    server: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = copy_home(finished, tmp_path / "home")
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    folder = local(MlflowClient(f"sqlite:///{home / 'mlflow.db'}").get_model_version_download_uri("small", "1"))
    weights, config = folder / "model/model.safetensors", folder / "model/config.json"
    read_by = folder / "components/tokenizer/tokenizer.json"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "generation_config.json").write_text("not mine")
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    config.unlink()
    config.mkdir()
    read_by.unlink()
    read_by.symlink_to(elsewhere / "generation_config.json")
    (folder / "added.txt").touch()

    def run_again() -> str:
        run = finetune(home, "run", str(finished.file), "--force", "score", **server)
        assert run.returncode == 0, run.stderr
        return " ".join(run.stderr.split())

    said = run_again()
    assert said.count("it was restored") == 2 and "model/config.json has changed since it was signed, and could" in said
    assert "added.txt was added since it was signed. Delete the version" in said
    config.rmdir()
    (folder / "added.txt").unlink()
    read_by.parent.rename(tmp_path / "tokenizer")
    read_by.parent.symlink_to(elsewhere)
    said = run_again()
    assert said.count("it was restored") == 1 and "tokenizer.json is missing since it was signed, and could" in said
    read_by.parent.unlink()
    assert "tokenizer.json is missing since it was signed; it was restored" in run_again()
    assert [file.read_text() for file in elsewhere.iterdir()] == ["not mine"]
    assert main(["verify", "small"]) == 0 and "as signed" in capsys.readouterr().out
    (trained,) = home.glob("artifacts/fit/*/model/model.safetensors")
    assert weights.samefile(trained)


def test_a_reproduction_reads_the_record_that_was_signed_and_refuses_one_that_was_edited_in_mlflow(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = copy_home(finished, tmp_path / "home")
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    shutil.rmtree(home / "runs")  # as a home that did not train it
    require_signed(find_version("small/1"))
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    run = client.get_run(str(client.get_model_version("small", "1").run_id))
    file = local(run.info.artifact_uri) / "lineage.json"
    file.write_text(file.read_text().replace('"num_train_epochs": 8', '"num_train_epochs": 9'))
    assert main(["reproduce", "small/1"]) == 2
    assert "was changed since it was signed, in recipe, recipe_without_defaults" in capsys.readouterr().err


def copy_home(finished: FinishedRun, home: Path) -> Path:
    """A copy with files of MLflow of its own: all others share those of the first home."""
    shutil.copytree(finished.home, home, symlinks=True)
    with contextlib.closing(sqlite3.connect(home / "mlflow.db")) as database, database:
        (uri,) = database.execute("SELECT storage_location FROM model_versions").fetchone()
        former = uri.partition("/mlartifacts/")[0]
        places = {"model_versions": "storage_location", "runs": "artifact_uri", "logged_models": "artifact_location"}
        for table, column in places.items():
            database.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (former, home.as_uri()))
    return home


def local(uri: str | None) -> Path:
    return Path(str(uri).removeprefix("file://"))
