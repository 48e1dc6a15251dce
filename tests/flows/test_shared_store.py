"""Two machines with a home each and one bucket."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import s3 as stand_in
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, states, write_project
from tests.s3 import BUCKET, KEYS, S3
from tests.servers import mlflow_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    yield from stand_in.server()


def leave_uploads(home: Path) -> None:
    """Records all artifacts as a killed run does."""
    (home / "uploads").mkdir()
    for folder in home.glob("artifacts/*/[!.]*"):
        (home / "uploads" / f"{folder.parent.name}.{folder.name}").touch()


@pytest.mark.slow
def test_a_second_home_trains_nothing_and_has_the_same_model(
    finished: FinishedRun, s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: dict[str, str]
) -> None:
    s3.reached(monkeypatch, **KEYS)
    shared = {**server, "FINETUNE_STORE": f"s3://{BUCKET}/team"}
    first = tmp_path / "first"
    shutil.copytree(finished.home, first, symlinks=True)
    leave_uploads(first)
    run = finetune(first, "run", str(finished.file), **shared)
    assert run.returncode == 0 and "Nothing changed" in run.stdout, run.stdout + run.stderr
    out = tmp_path / "out.json"
    run = finetune(tmp_path / "second", "run", str(finished.file), "--json", str(out), **shared)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    artifacts = [stage for stage in result["stages"] if stage["artifact"]]
    assert {stage["name"]: stage["state"] for stage in artifacts} == dict.fromkeys(
        (stage["name"] for stage in artifacts), "cached"
    )
    assert all(stage["fetched_bytes"] is not None for stage in artifacts)
    assert result["model"]["sha256"] == finished.result["model"]["sha256"]
    assert "load_data        cached" in run.stdout and "fetched" in run.stdout
    assert not any((tmp_path / "second" / "uploads").glob("[!.]*"))
    # Credentials of the bucket are nowhere in the home.
    secret = KEYS["AWS_SECRET_ACCESS_KEY"].encode()
    for folder, _, files in os.walk(tmp_path / "second"):
        assert not [name for name in files if secret in (Path(folder) / name).read_bytes()]


@pytest.fixture
def mlflow(tmp_path: Path, fresh_database: Path) -> Iterator[str]:
    server = mlflow_server(tmp_path, fresh_database)
    server.start()
    server.wait()
    yield server.url
    server.kill()


@pytest.mark.drill
def test_with_the_registry_and_the_bucket_alone_a_model_is_shown_reproduced_and_compared_with(
    s3: S3, mlflow: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: dict[str, str]
) -> None:
    s3.reached(monkeypatch, **KEYS)
    team = {**server, "FINETUNE_STORE": f"s3://{BUCKET}/alone", "MLFLOW_TRACKING_URI": mlflow}
    file, out = write_project(tmp_path / "project"), tmp_path / "out.json"

    def run(home: str, *arguments: str) -> str:
        done = finetune(tmp_path / home, *arguments, **team)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("first", "run", str(file), "--json", str(out))
    weights = json.loads(out.read_text())["model"]["sha256"]
    shutil.rmtree(tmp_path / "first")
    (tmp_path / "project").rename(tmp_path / "moved")

    s3.requests.clear()
    assert weights in run("second", "show", "small/1")
    assert s3.requests == [], "the record is in the registry"
    reproduced = run("second", "reproduce", "small/1")
    assert "load_data as stored" in reproduced and f"The same bytes: sha256 {weights}" in reproduced
    assert not any("/fit/" in request for request in s3.requests if request.startswith("GET")), "it was trained"
    assert "pos" in run("second", "predict", "small", "a great film")

    (tmp_path / "moved").rename(tmp_path / "project")
    changed = ("run", str(file), "--set", "training.seed=7", "--json", str(out))
    assert "is fetched from MLflow" not in run("third", *changed)
    assert states(out)["predict_champion"] == "ran"
    run("fourth", *changed)
    assert states(out)["predict_champion"] == states(out)["fit"] == "cached"
