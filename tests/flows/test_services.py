"""`finetune up`, `deploy`, `status` and `down`: who reaches the servers, and the life of a deployment between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
import yaml

from tasks.prefect.events import VERDICT
from tasks.servers import MLFLOW, PREFECT, is_healthy
from tests import fork_server
from tests.flows.forked import finetune
from tests.flows.slowly import QUICK
from tests.flows.small import FinishedRun, command, environment
from tests.machine import Machine, of_home
from tests.processes import argv, listening
from tests.waiting import wait_until
from training.jobs.processes import find_readers, variable

pytestmark = pytest.mark.slow

EVIL = "http://evil.example"
NOBODY = "00000000-0000-0000-0000-000000000000"
PREFECT_REQUESTS: dict[str, Any] = {
    "POST flows/": {"name": "mine"},
    "POST deployments/": {"name": "mine", "flow_id": NOBODY, "work_pool_name": "finetune", "entrypoint": "a:b"},
    f"POST deployments/{NOBODY}/create_flow_run": {"job_variables": {"command": "touch /tmp/mine"}},
    "POST block_documents/filter": {"include_secrets": True},
    "POST variables/": {"name": "mine", "value": 1},
    "POST work_pools/finetune/workers/filter": {},
    "PATCH work_pools/finetune": {"base_job_template": {}},
    "GET admin/settings": None,
    "GET version": None,
}
MLFLOW_REQUESTS: dict[str, Any] = {
    "POST api/2.0/mlflow/experiments/create": {"name": "mine"},
    "POST ajax-api/2.0/mlflow/experiments/create": {"name": "mine"},
    "GET api/2.0/mlflow/experiments/search?max_results=9": None,
    "POST api/2.0/mlflow/registered-models/create": {"name": "mine"},
    "POST api/2.0/mlflow/users/create": {"username": "mine", "password": "mine-mine-mine"},
    "PUT api/2.0/mlflow-artifacts/artifacts/mine": {},
    "GET api/2.0/mlflow-artifacts/artifacts": None,
    "POST graphql": {"query": "{mlflowSearchRuns {runs {info {runId}}}}"},
    "POST v1/traces": {},
    "GET get-artifact?path=x&run_uuid=x": None,
    "GET ": None,
}


RUNS_START_FORKS = f"""
import os, sys
if "PREFECT__FLOW_RUN_ID" in os.environ:
    sys.executable = {fork_server.forked_python()!r}
"""
"""A sitecustomize.py: the programs of a flow run are forks, which import nothing."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, finished: FinishedRun, fresh_database: Path) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("services")
    home = folder / "home"
    # Rows, model and tokens are there; predictions and scores are found again if the weights are the same.
    shutil.copytree(finished.home / "artifacts", home / "artifacts", ignore=shutil.ignore_patterns("fit"))
    shutil.copy(fresh_database, home / "mlflow.db")
    home.chmod(0o700)
    (folder / "sitecustomize.py").write_text(RUNS_START_FORKS)
    made = Machine(home)
    made.env["PYTHONPATH"] += f"{os.pathsep}{folder}"
    made.up()
    yield made
    made.finetune("down")


def addresses(machine: Machine) -> tuple[str, str]:
    return machine.env["PREFECT_API_URL"], machine.env["MLFLOW_TRACKING_URI"]


def password(machine: Machine, server: str) -> str:
    return (machine.home / "services" / f"{server}.password").read_text()


def basic(password: str) -> str:
    return f"Basic {b64encode(f'finetune:{password}'.encode()).decode()}"


def refused(url: str, requests: dict[str, Any], **headers: str) -> dict[str, int]:
    """The status of each request."""
    found = {}
    for request, body in requests.items():
        method, path = request.split(" ")
        sent = None if body is None else json.dumps(body)
        typed = {"Content-Type": "application/json", **headers}
        found[request] = httpx2.request(method, f"{url}/{path}", content=sent, headers=typed).status_code
    return found


def stored(machine: Machine) -> tuple[Any, ...]:
    """The numbers of Prefect's objects, and MLflow's experiments and models."""
    _, mlflow = addresses(machine)
    login = ("finetune", password(machine, MLFLOW))
    counts = [machine.api(f"{table}/count", flows={}) for table in ("flows", "deployments", "variables", "flow_runs")]
    found = httpx2.get(f"{mlflow}/api/2.0/mlflow/experiments/search?max_results=9", auth=login).json()
    models = httpx2.get(f"{mlflow}/api/2.0/mlflow/registered-models/search", auth=login).json()
    return counts, [experiment["name"] for experiment in found["experiments"]], models


def test_without_the_password_every_request_is_refused_and_nothing_is_made(machine: Machine) -> None:
    prefect, mlflow = addresses(machine)
    before = stored(machine)
    other = {server: basic(password(machine, server)) for server in (PREFECT, MLFLOW)}
    for headers in ({}, {"Origin": EVIL, "Host": "evil.example"}, {"Authorization": basic("password1234")}):
        assert set(refused(prefect, PREFECT_REQUESTS, **headers).values()) == {401}
        assert set(refused(mlflow, MLFLOW_REQUESTS, **headers).values()) == {401}
    assert set(refused(prefect, PREFECT_REQUESTS, Authorization=other[MLFLOW]).values()) == {401}
    assert set(refused(mlflow, MLFLOW_REQUESTS, Authorization=other[PREFECT]).values()) == {401}
    assert stored(machine) == before


def test_without_the_password_no_events_are_sent_or_received(machine: Machine) -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake

    prefect, _ = addresses(machine)

    async def greeted(path: str, *first: dict[str, str]) -> bool:
        try:
            async with connect(prefect.replace("http", "ws") + path, subprotocols=["prefect"]) as socket:  # type: ignore[list-item]
                await socket.send(json.dumps({"type": "auth", "token": "finetune:guess"}))
                return bool(json.loads(await socket.recv()))
        except (ConnectionClosed, InvalidHandshake):
            return False

    for path in ("/events/in", "/events/out", "/logs/out", "/work_pools/finetune/workers/connect"):
        assert not asyncio.run(greeted(path))


def test_with_the_password_foreign_hosts_and_web_pages_are_refused_all_the_same(machine: Machine) -> None:
    prefect, mlflow = addresses(machine)
    requests = {PREFECT: (f"{prefect}/version", "GET"), MLFLOW: (f"{mlflow}/api/2.0/mlflow/experiments/search", "GET")}
    for server, (url, method) in requests.items():
        login = ("finetune", password(machine, server))
        assert httpx2.request(method, f"{url}?max_results=1", auth=login).is_success
        for headers in ({"Host": "evil.example"}, {"Origin": EVIL}, {"Origin": "http://localhost:9999"}):
            answer = httpx2.request(method, f"{url}?max_results=1", auth=login, headers=headers)
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    # A page at one name of Prefect's server reads from the other name, and a browser asks first whether it may.
    own = {"Origin": prefect.removesuffix("/api").replace("127.0.0.1", "localhost")}
    asks = own | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert (
        httpx2.options(f"{prefect}/flows/filter", headers=asks).headers["access-control-allow-origin"] == own["Origin"]
    )
    answer = httpx2.get(f"{prefect}/version", auth=("finetune", password(machine, PREFECT)), headers=own)
    assert answer.headers["access-control-allow-origin"] == own["Origin"]


def test_all_that_up_starts_listens_on_loopback_and_no_port_is_free_while_its_server_restarts(
    machine: Machine,
) -> None:
    found = listening(of_home(machine.home))
    assert {str(address) for addresses in found.values() for address in addresses} == {"127.0.0.1"}
    ports = [int(url.removesuffix("/api").rpartition(":")[2]) for url in addresses(machine)]
    killed = [pid for pid in found if any(word.startswith("--fd=") for word in argv(pid))]
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    for port in ports:
        with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", port)):
            pass
    wait_until(lambda: all(is_healthy(url) for url in addresses(machine)))


def test_an_action_of_an_automation_reaches_the_server_from_inside(machine: Machine) -> None:
    flow = machine.api("flows/", name="watched")["id"]
    run = machine.api("flow_runs/", flow_id=flow, state={"type": "RUNNING"})["id"]
    machine.api(
        "automations/",
        name="crash",
        trigger={"type": "event", "posture": "Reactive", "threshold": 1, "within": 0, "expect": ["silent"]},
        actions=[{"type": "change-flow-run-state", "state": "CRASHED", "name": "Crashed"}],
    )
    resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
    login = ("finetune", password(machine, PREFECT))

    def has_crashed() -> bool:
        now = datetime.now(UTC).isoformat()  # again and again: the server may load the automation after an event
        event = {"event": "silent", "resource": resource, "occurred": now, "id": str(uuid4())}
        assert httpx2.post(f"{addresses(machine)[0]}/events", json=[event], auth=login).status_code == 204
        time.sleep(1)
        return machine.state_of(run) == "Crashed"

    wait_until(has_crashed)


@pytest.mark.parametrize("server", [PREFECT, MLFLOW])
def test_a_password_is_in_one_file_that_only_the_user_can_read(machine: Machine, server: str) -> None:
    file, secret = machine.home / "services" / f"{server}.password", password(machine, server)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(secret) >= 32
    holding = [path for path in machine.home.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert holding == [file]
    shown = [pid for pid in of_home(machine.home) if any(secret in word for word in argv(pid))]
    assert shown == []


def test_commands_log_in_by_themselves_and_a_person_is_shown_how(machine: Machine) -> None:
    bare = Machine(machine.home)  # a shell that was not pointed at the servers
    assert bare.finetune("runs").returncode == 0
    shown = bare.finetune("notify")
    assert (shown.returncode, shown.stdout) == (0, "There are no notifications: name a block.\n")
    shown = bare.finetune("status", "--password").stdout
    assert f"Log in to Prefect: finetune:{password(machine, PREFECT)}\n" in shown
    assert f"user finetune, password {password(machine, MLFLOW)}\n" in shown


def test_a_deployment_runs_is_cancelled_goes_on_to_the_same_bytes_and_down_leaves_nothing(
    machine: Machine, finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor does it import what lies beside the rows."""
    from mlflow import MlflowClient

    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, machine.env[name])
    assert machine.env["PREFECT_API_URL"] == f"http://127.0.0.1:{machine.ports[1]}/api"
    again = machine.finetune("up", "--detach")
    assert again.returncode == 0 and "They run already" in again.stdout

    (tmp_path / "brotli.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    with contextlib.chdir(tmp_path):
        machine.deploy(finished.file)
    flow_run = machine.start("finetune/small", {"training.callbacks": ["tests.flows.slowly:Slowly"]})
    wait_until(machine.trains)
    machine.prefect("flow-run", "cancel", flow_run)
    wait_until(lambda: not [pid for pid in of_home(machine.home) if variable(pid, "PREFECT__FLOW_RUN_ID")], 30)
    assert not any(map(find_readers, machine.home.glob("jobs/*/lock")))
    wait_until(lambda: machine.state_of(flow_run) == "Cancelled")
    client = MlflowClient(machine.env["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"

    machine.prefect("flow-run", "retry", flow_run)
    wait_until(lambda: any(map(find_readers, machine.home.glob("jobs/*/lock"))), 60)
    assert machine.finetune("down").returncode == 0
    machine.up()
    state = machine.api(f"flow_runs/{flow_run}")["state"]
    assert (state["name"], state["type"]) == ("Cancelled", "CANCELLED")
    assert state["message"].startswith("Stopped by `finetune down`")
    crashed = [event["resource"]["prefect.resource.id"] for event in machine.events("prefect.flow-run.Crashed")]
    assert f"prefect.flow-run.{flow_run}" not in crashed

    (machine.home / QUICK).touch()
    resumed = machine.finetune("resume", flow_run)
    assert resumed.returncode == 0, resumed.stderr
    wait_until(lambda: machine.state_of(flow_run) == "Completed", 150)
    (same,) = client.search_runs([experiment.experiment_id])
    assert (same.info.run_id, same.info.status) == (run.info.run_id, "FINISHED")
    assert same.data.tags["fit.state"] == "resumed" and same.data.tags["predict.state"] == "cached"
    assert str(client.get_model_version_by_alias("small", "champion").version) == "1"
    wait_until(lambda: bool(machine.events(VERDICT)), 30)
    assert not (tmp_path / "imported").exists()
    (verdict,) = machine.events(VERDICT)
    assert verdict["resource"] == {"prefect.resource.id": "finetune.model.small", "finetune.decision": "promote"}
    sent = verdict["payload"]
    assert (sent["version"], sent["flow_run_id"], sent["mlflow_run_id"]) == ("small/1", flow_run, run.info.run_id)
    assert sent["summary"].startswith("promoted, accuracy ") and sent["reason"]

    assert machine.finetune("down").returncode == 0
    assert of_home(machine.home) == []
    assert machine.finetune("status").returncode == 1


def test_a_foreground_up_whose_terminal_is_closed_leaves_nothing_running(tmp_path: Path) -> None:
    closed = Machine(tmp_path / "home")
    env = environment(closed.home, **closed.env)
    up = subprocess.Popen(
        command("up", *closed.ports),
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # which nohup has ignored
    )
    try:
        wait_until((closed.home / "services" / "prefect" / "logs").exists)
        up.send_signal(signal.SIGHUP)
        up.wait(30)
        wait_until(lambda: of_home(closed.home) == [], 30)
    finally:
        up.kill()
        closed.finetune("down")


def test_all_mistakes_of_deployment_files_are_reported_before_any_is_deployed(
    tmp_path: Path, finished: FinishedRun
) -> None:
    document = yaml.safe_load(finished.file.read_text())
    (entry,) = document["deployments"]
    good = {**entry, "work_pool": {"name": "finetune"}}
    wrong = {
        "no_pool.yaml": entry,
        "flow.yaml": {**good, "name": "other", "entrypoint": "flows.finetune:fintune"},
        "field.yaml": {**good, "name": "third", "shedules": []},
        "cron.yaml": {**good, "name": "fourth", "schedules": [{"cron": "every day"}]},
        "recipe.yaml": {
            **good,
            "name": "fifth",
            "parameters": {"recipe": {**entry["parameters"]["recipe"], "name": 5}},
        },
        "twice.yaml": {**good, "name": "sixth"},
        "again.yaml": {**good, "name": "sixth"},
    }
    files = []
    for name, one in wrong.items():
        (tmp_path / name).write_text(yaml.safe_dump({"deployments": [one]}))
        files.append(str(tmp_path / name))
    run = finetune(tmp_path / "home", "deploy", *files)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    lines = run.stderr.splitlines()
    assert "no_pool.yaml: small.work_pool: a deployment needs a work pool" in run.stderr
    assert "'flows.finetune:fintune' is not flows.finetune:finetune or flows.retrain:retrain or " in run.stderr
    assert "Did you mean 'flows.finetune:finetune'?" in run.stderr
    assert "field.yaml: third.shedules: Prefect has no such field. Did you mean 'schedules'?" in run.stderr
    assert "cron.yaml: fourth.schedules[0]: cron 'every day': Invalid cron string" in run.stderr
    assert "recipe.yaml: fifth: name" in run.stderr
    assert "finetune/sixth is deployed more than once" in run.stderr
    assert len(lines) == 6


def test_without_a_server_deploy_fails_with_the_command_that_starts_one(tmp_path: Path, finished: FinishedRun) -> None:
    document = yaml.safe_load(finished.file.read_text())
    document["deployments"][0]["work_pool"] = {"name": "finetune"}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(document))
    run = finetune(tmp_path / "home", "deploy", str(tmp_path / "small.yaml"))
    assert (run.returncode, run.stderr) == (
        2,
        "PREFECT_API_URL: there is no Prefect server: start one with `finetune up`, or name yours.\n",
    )


def test_ports_that_are_taken_are_reported_together(tmp_path: Path) -> None:
    import socket

    with socket.socket() as one, socket.socket() as two:
        ports = []
        for taken in (one, two):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports.append(str(taken.getsockname()[1]))
        run = finetune(tmp_path / "home", "up", "--prefect-port", ports[0], "--mlflow-port", ports[1])
    assert run.returncode == 2
    lines = run.stderr.splitlines()
    assert f"--prefect-port: port {ports[0]} cannot be used (Address already in use)" in lines[-2]
    assert f"--mlflow-port: port {ports[1]} cannot be used" in lines[-1]
