"""MLflow's database in the home folder."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tasks.tracking.connection import connect, find_or_create_run, list_registered, search_all
from tests.fork_server import COMMANDS, Fork


def test_a_process_killed_while_it_makes_the_database_leaves_none_and_the_next_makes_a_whole_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # has no template to copy
    maker = Fork(connect, level=COMMANDS).start()
    aside = home / ".mlflow.db-new"
    while maker.is_alive() and not (aside.exists() and aside.stat().st_size > 0):
        time.sleep(0.001)
    maker.kill()
    assert maker.join(10) == -signal.SIGKILL
    assert not (home / "mlflow.db").exists() and aside.stat().st_size > 0
    client = connect()
    run = client.get_run(find_or_create_run(client, "recipe", "flow"))
    assert run.info.status == "RUNNING"
    assert not list(home.glob(".mlflow.db-new*"))


def test_in_a_home_that_was_moved_mlflow_names_the_files_where_they_are_now(
    tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.artifacts import download_artifacts

    elsewhere = (tmp_path / "other").as_uri()
    client = connect()
    run = find_or_create_run(client, "my recipe", "flow")
    client.log_text(run, "here", "note.txt")
    client.create_registered_model("small")
    client.create_model_version("small", client.get_run(run).info.artifact_uri, run)
    client.create_experiment("elsewhere", artifact_location=elsewhere)
    moved = tmp_path / "moved home"
    tracked.rename(moved)
    monkeypatch.setenv("FINETUNE_HOME", str(moved))
    client, uri = connect(), f"sqlite:///{moved / 'mlflow.db'}"
    for place in (f"runs:/{run}/note.txt", f"{client.get_model_version_download_uri('small', '1')}/note.txt"):
        assert Path(download_artifacts(artifact_uri=place, tracking_uri=uri)).read_text() == "here"
    later = client.get_run(find_or_create_run(client, "my recipe", "later")).info.artifact_uri
    assert later.startswith((moved / "mlartifacts").as_uri()) and not tracked.exists()
    assert client.get_experiment_by_name("elsewhere").artifact_location == elsewhere


def test_registered_versions_are_those_that_mlflow_lists_without_deleted_ones(tracked: Path) -> None:
    client = connect()
    for name in ("small", "other"):
        client.create_registered_model(name)
        for _ in range(3):
            client.create_model_version(name, "file:///model")
    client.delete_model_version("small", "2")
    client.delete_registered_model("other")
    listed = {f"{version.name}/{version.version}" for version in search_all(client.search_model_versions)}
    assert list_registered(client) == listed == {"small/1", "small/3"}
