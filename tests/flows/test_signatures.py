"""Signatures of versions, by the commands of people."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.cli.main import main
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_rows


def test_a_registered_version_is_signed_and_stays_usable_after_a_report_of_drift_and_a_changed_byte_is_refused(
    finished: FinishedRun,
    server: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
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
    folder = Path(client.get_model_version_download_uri("small", "1").removeprefix("file://"))
    source = client.get_model_version("small", "1").source
    if not folder.is_dir():
        folder = next(finished.home.parent.rglob(f"{source.rpartition('/')[2]}/artifacts"))
    config = folder / "model" / "config.json"
    content = config.read_bytes()
    shutil.rmtree(home / "artifacts" / "fit")  # as a home that did not train it
    config.write_bytes(content.replace(b" ", b"\t", 1))
    try:
        refused = finetune(home, *predict, str(tmp_path / "second.csv"), **server)
        assert refused.returncode == 2 and "config.json has changed since it was signed" in refused.stderr
        assert not (tmp_path / "second.csv").exists() and main(["verify", "small"]) == 1
        assert "config.json has changed" in capsys.readouterr().err
    finally:
        config.write_bytes(content)
