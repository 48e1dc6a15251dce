"""MLflow's server of a home: over the home as it is now, and behind the guard."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tasks.home import home, mlflow_artifacts
from tasks.servers import MLFLOW, ensure_password, is_healthy
from tasks.tracking.connection import connect
from tests.fork_server import NEW_PYTHON
from tests.waiting import wait_until

ARTIFACTS = "api/2.0/mlflow-artifacts/artifacts"
MB = 2**20


@contextmanager
def served(python: str = sys.executable) -> Iterator[tuple[str, int]]:
    """The server over this home: its address and the pid of its process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, passed = listening.getsockname()[1], listening.fileno()
        argv = [python, "-m", "tasks.services.mlflow_server", str(port), f"--fd={passed}"]
        server = subprocess.Popen(argv, env={**os.environ, "FINETUNE_HOME": str(home())}, pass_fds=[passed])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_healthy(url))
        yield url, server.pid
    finally:
        server.terminate()
        server.wait()


def login() -> tuple[str, str]:
    return "finetune", ensure_password(MLFLOW)


def peak_mb(pid: int) -> float:
    """The most memory that the process has had."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def test_a_home_that_was_moved_is_served_where_it_is_now(
    tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    client.create_experiment("small", artifact_location=(mlflow_artifacts() / "small").as_uri())
    mlflow_artifacts().mkdir(exist_ok=True)
    moved = tmp_path / "moved"
    shutil.copytree(tracked, moved)
    shutil.rmtree(tracked)
    monkeypatch.setenv("FINETUNE_HOME", str(moved))
    with served() as (url, _):
        found = httpx2.get(f"{url}/api/2.0/mlflow/experiments/get-by-name?experiment_name=small", auth=login()).json()
    assert found["experiment"]["artifact_location"] == (moved / "mlartifacts" / "small").as_uri()


def test_files_that_were_written_through_the_server_are_read_and_moved_without_it(
    tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    connect()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", login()[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", login()[1])
    with served() as (url, _):
        client = MlflowClient(url)
        experiment = client.create_experiment("small")
        assert client.get_experiment(experiment).artifact_location == f"mlflow-artifacts:/{experiment}"
        run = client.create_run(experiment).info.run_id
        client.log_text(run, "sent", "note.txt")
    moved = tracked.rename(tmp_path / "moved")
    monkeypatch.setenv("FINETUNE_HOME", str(moved))
    uri = f"sqlite:///{moved / 'mlflow.db'}"
    assert connect().get_run(run).info.artifact_uri == (moved / f"mlartifacts/{experiment}/{run}/artifacts").as_uri()
    assert Path(download_artifacts(artifact_uri=f"runs:/{run}/note.txt", tracking_uri=uri)).read_text() == "sent"
    with served() as (url, _):
        again = download_artifacts(artifact_uri=f"runs:/{run}/note.txt", tracking_uri=url)
        assert Path(again).read_text() == "sent"


@pytest.mark.slow
def test_a_body_of_any_length_takes_no_memory_before_the_password_and_a_model_none_after_it(tracked: Path) -> None:
    content = bytes(MB)
    with served(NEW_PYTHON) as (url, pid):
        before = peak_mb(pid)
        for path in ("api/2.0/mlflow/experiments/create", f"{ARTIFACTS}/mine", "v1/traces"):
            # The server closes the connection: what has not been sent by then cannot be.
            try:
                refused = httpx2.post(f"{url}/{path}", content=(content for _ in range(150))).status_code
            except httpx2.TransportError:
                refused = 401
            assert refused == 401
        uploaded = httpx2.put(f"{url}/{ARTIFACTS}/model/weights", content=(content for _ in range(150)), auth=login())
        assert uploaded.status_code == 200 and peak_mb(pid) < before + 60
        assert (mlflow_artifacts() / "model" / "weights").stat().st_size == 150 * MB
        too_long = httpx2.post(
            f"{url}/api/2.0/mlflow/experiments/create", content=(content for _ in range(65)), auth=login()
        )
        assert too_long.status_code == 413


def test_pages_of_another_server_on_this_machine_neither_read_nor_write_with_the_browser_s_login(tracked: Path) -> None:
    with served() as (url, _):

        def ask(method: str, **headers: str) -> httpx2.Response:
            path = "create" if method == "POST" else "search?max_results=9"
            body = {"name": f"made by {headers}"} if method == "POST" else None
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return httpx2.request(
                method, f"{url}/api/2.0/mlflow/experiments/{path}", json=body, headers=sent, auth=login()
            )

        for origin in (
            "http://localhost:9999",
            "http://127.0.0.1:9999",
            "http://[::1]:9999",
            "http://localhost",
            "null",
        ):
            answers = [ask(method, Origin=origin) for method in ("GET", "POST", "OPTIONS")]
            assert [answer.status_code for answer in answers] == [403, 403, 403], origin
            assert not any("access-control-allow-origin" in answer.headers for answer in answers)
        for site in (
            "same-site",
            "cross-site",
        ):  # requested without an Origin: pictures, scripts, forms in old browsers
            assert ask("GET", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors").status_code == 403
            assert ask("POST", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate").status_code == 403
        assert ask("GET", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document").is_success
        for host in ("127.0.0.1", "localhost"):
            assert ask("POST", Origin=url.replace("127.0.0.1", host)).is_success
        assert ask("POST", Host="localhost:8080", Origin="http://localhost:8080").is_success  # through a tunnel
        names = [experiment["name"] for experiment in ask("GET").json()["experiments"]]
    assert len(names) == 4 and not [name for name in names if "9999" in name]
