"""MLflow's database in the home folder."""

from __future__ import annotations

import contextlib
import http.server
import json
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from tasks.tracking import connection
from tasks.tracking.connection import connect, find_or_create_run, list_registered, search_all
from tasks.tracking.mlflow_run import Mlflow, run_of
from tasks.tracking.outbox import Outbox
from tasks.tracking.tracker import Delivery
from tests.fork_server import COMMANDS, Fork
from tests.servers import closed_port, mlflow_server


@pytest.mark.slow
def test_a_process_killed_while_it_makes_the_database_leaves_none_and_the_next_makes_a_whole_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # has no template to copy
    maker = Fork(connect, level=COMMANDS).start()
    aside = home / ".mlflow.db-new"
    while maker.is_alive() and not (aside.exists() and aside.stat().st_size > 0):
        time.sleep(0.001)
    maker.kill()
    assert maker.join(60) == -signal.SIGKILL
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


@pytest.mark.parametrize(
    ("root", "refused"), [("mlflow-artifacts:/", False), ("{tmp}/here", False), ("{tmp}/elsewhere", True)]
)
def test_a_server_that_keeps_files_where_this_machine_cannot_write_is_named_before_training(
    home: Path, fresh_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, refused: bool
) -> None:
    server = mlflow_server(tmp_path, fresh_database)
    with contextlib.closing(sqlite3.connect(tmp_path / "server.db")) as database, database:
        location = root.format(tmp=tmp_path) + "/0"
        database.execute("UPDATE experiments SET artifact_location = ?", (location,))
    (tmp_path / "here").mkdir()
    server.start()
    try:
        server.wait()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        problems = connection.find_server_problems("small")
    finally:
        server.kill()
    assert [problem.where for problem in problems] == ["MLFLOW_TRACKING_URI"] * refused
    assert all("--artifacts-destination" in problem.message for problem in problems)
    assert not (tmp_path / "elsewhere").exists()


def test_a_server_without_an_endpoint_is_named_before_training_and_one_that_is_away_is_a_warning(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Old(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = "experiments" in self.path
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(
                json.dumps({"experiments": [{"artifact_location": "s3://b/0"}]}).encode() if known else b"no"
            )

        do_POST = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        (old,) = connection.find_server_problems("small")
        server.shutdown()
    assert old.level == "error" and "update it to MLflow 3" in old.message
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
    (away,) = connection.find_server_problems("small")
    assert away.level == "warning" and "does not answer" in away.message


def test_files_of_a_run_are_not_written_to_this_machine_for_a_server_that_keeps_them_elsewhere(
    home: Path, fresh_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, warnings = mlflow_server(tmp_path, fresh_database), list[str]()
    server._env["_MLFLOW_SERVER_ARTIFACT_ROOT"] = str(tmp_path / "elsewhere")
    server.start()
    try:
        server.wait()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        outbox = Outbox("flow")
        outbox.put("start", experiment="small")
        outbox.put("text", name="a.txt", content="a")
        outbox.put("text", name="b.txt", content="b")
        Delivery(outbox, Mlflow(run_of(outbox), warnings.append)).deliver()
    finally:
        server.kill()
    assert not (tmp_path / "elsewhere").exists() and not list(outbox.read_undelivered())
    (warning,) = warnings
    assert f"keeps them in {tmp_path}/elsewhere" in warning
