"""`finetune doctor`: what is wrong with a machine, and what to do."""

from __future__ import annotations

import fcntl
import http.server
import socket
import sqlite3
import threading
from importlib.metadata import version
from pathlib import Path

import pytest
from prefect.client.schemas.objects import StateType

from flows.cli.main import main
from tasks.prefect import flow_runs
from tasks.services import doctor
from tasks.services.doctor import Finding, run_checks
from tasks.shared_store.bucket import Bucket
from tasks.tracking.outbox import Outbox
from tests.s3 import S3
from tests.servers import closed_port
from tests.tasks.shared import on_s3, s3

__all__ = ["on_s3", "s3"]

TOKEN = "hf_never_told"


@pytest.fixture(autouse=True)
def elsewhere(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing has run."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def of(what: str) -> list[Finding]:
    return [finding for finding in run_checks() if finding.subject == what]


def store(url: str) -> list[Finding]:
    """The findings about the shared store of this URL."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FINETUNE_STORE", url)
        return list(doctor._check_store())


def test_where_nothing_has_run_there_is_no_problem_and_the_home_is_not_made(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{home} does not exist yet: the first run creates it" in printed
    assert "problem" not in printed and f"prefect {version('prefect')}" in printed and "from HF_TOKEN" in printed
    assert TOKEN not in printed and not home.exists()


def test_each_problem_comes_with_what_to_do_and_the_exit_code_is_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    home.mkdir(mode=0o700)
    (home / "mlflow.db").write_bytes(b"SQLite format 3\0" + b"\1" * 5000)
    (home / "locks").mkdir()
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["prefect<3", "nowhere>=1", "absent; extra=='x'"])
    monkeypatch.setattr("tasks.services.doctor.PREFECT_PORT", port := closed_port())
    away = f"http://127.0.0.1:{closed_port()}/api"
    with (
        temporary_settings({PREFECT_API_URL: away}),
        socket.socket() as taken,
        open(home / "locks" / "fit-k.lock", "w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        found = {finding.subject: finding for finding in run_checks()}
        assert main(["doctor"]) == 1
    problems = {what for what, finding in found.items() if finding.level == "problem"}
    assert problems == {"prefect", "nowhere", "MLflow", "Prefect"}
    assert all(found[what].next_step for what in problems) and away in found["Prefect"].found
    assert found["prefect"].next_step == "pip install 'prefect<3' -c constraints.txt"
    assert (found[f"port {port}"].level, found[f"port {port}"].found) == ("warning", "Address already in use")
    assert "in use: fit-k" in found["home"].found
    assert "→ pip install 'nowhere>=1'" in capsys.readouterr().out
    home.chmod(0o777)
    (check,) = of("home")
    assert check.level == "problem" and "chmod 700" in check.next_step
    assert "may be written by others" in check.found


def test_a_database_is_whole_damaged_or_without_a_schema_and_stays_as_it_is(home: Path) -> None:
    home.mkdir(mode=0o700)
    file = home / "mlflow.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE runs (name)")
        database.commit()
    assert of("MLflow")[0].level == "problem"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE alembic_version (version_num)")
        database.execute("INSERT INTO alembic_version VALUES ('abc123')")
        database.executemany("INSERT INTO runs VALUES (?)", [("x" * 500,)] * 100)
        database.commit()
    database.close()
    before = file.read_bytes()
    (whole,) = of("MLflow")
    assert (whole.level, whole.found) == ("ok", f"{file} is intact, schema abc123")
    assert file.read_bytes() == before
    file.write_bytes(before[:-4096] + b"\7" * 4096)
    (damaged,) = of("MLflow")
    assert damaged.level == "problem" and "move mlflow.db away" in damaged.next_step


@pytest.mark.parametrize(("status", "does"), [(401, "MLFLOW_TRACKING_PASSWORD"), (403, "MLFLOW_SERVER_ALLOWED_HOSTS")])
def test_an_mlflow_that_is_well_and_refuses_its_client_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, status: int, does: str
) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else status)
            self.end_headers()

        do_POST = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        (found,) = of("MLflow")
        server.shutdown()
    assert found.level == "problem" and found.found.endswith(f": HTTP {status}") and does in found.next_step


def test_a_shared_store_is_read_and_written_and_nothing_is_left_in_it(on_s3: str, s3: S3) -> None:
    (found,) = store(on_s3)
    assert (found.level, found.found) == ("ok", f"{on_s3}: may be read and written")
    assert not any("doctor" in name for name in s3.names())
    s3.fault = lambda request: 403 if request.startswith("PUT") else None
    (found,) = store(on_s3)
    assert (found.level, found.found) == ("ok", f"{on_s3}: may only be read")


@pytest.mark.slow
@pytest.mark.parametrize("status", [403, 503])
def test_a_shared_store_that_refuses_or_fails_is_a_problem(on_s3: str, s3: S3, status: int) -> None:
    s3.fault = lambda request: status
    (found,) = store(on_s3)
    assert found.level == "problem" and on_s3 in found.found and "AWS_ACCESS_KEY_ID" in found.next_step


def test_a_shared_store_without_conditional_writes_is_a_problem(
    on_s3: str, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bucket, "create", Bucket.write)
    (found,) = store(on_s3)
    assert found.level == "problem" and "If-None-Match" in found.found
    assert not any("doctor" in name for name in s3.names())


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "file:///no/such/folder", "s3://no-such-bucket/prefix"])
def test_a_wrong_name_of_a_shared_store_is_a_problem(on_s3: str, url: str) -> None:
    (found,) = store(url)
    assert found.level == "problem" and url in found.found and "FINETUNE_STORE" in found.next_step


def test_undelivered_entries_and_states_are_found_except_those_of_a_run_that_is_running(home: Path) -> None:
    for run in ("over", "goes-on", "heard"):
        Outbox(run).put("start", experiment="recipe")
        Outbox(run).put("end", status="FINISHED")
    heard = Outbox("heard")
    heard.mark_delivered(heard.read_undelivered()[-1][1])
    flow_runs.save_final_state("heard", StateType.COMPLETED)
    with Outbox("goes-on").claim_run():
        found = of("undelivered")
    assert [(one.level, one.found) for one in found] == [
        ("warning", "MLflow has not all of 1 run: over"),
        ("warning", "Prefect has no final state of 1 run: heard"),
    ]
    assert all("the next run" in one.next_step for one in found)
