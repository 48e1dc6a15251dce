"""The servers of `finetune up`, as another user of the machine or a web page reaches them: without the password."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from tests.flows.small import command, environment
from tests.machine import Machine, of_home
from tests.waiting import wait_until

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


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("access") / "home")
    made.up()
    yield made
    made.finetune("down")


def addresses(machine: Machine) -> tuple[str, str]:
    return machine.env["PREFECT_API_URL"], machine.env["MLFLOW_TRACKING_URI"]


def password(machine: Machine) -> str:
    return (machine.home / "services" / "password").read_text()


def refused(url: str, requests: dict[str, Any], **headers: str) -> dict[str, int]:
    """The status of each request."""
    found = {}
    for request, body in requests.items():
        method, path = request.split(" ")
        sent = None if body is None else json.dumps(body)
        typed = {"Content-Type": "application/json", **headers}
        found[request] = httpx2.request(method, f"{url}/{path}", content=sent, headers=typed).status_code
    return found


def test_without_the_password_every_request_is_refused_and_nothing_is_made(machine: Machine) -> None:
    prefect, mlflow = addresses(machine)
    for headers in ({}, {"Origin": EVIL, "Host": "evil.example"}, {"Authorization": "Basic YWRtaW46cGFzc3dvcmQxMjM0"}):
        assert set(refused(prefect, PREFECT_REQUESTS, **headers).values()) == {401}
    assert set(refused(mlflow, MLFLOW_REQUESTS).values()) == {401}
    assert set(refused(mlflow, MLFLOW_REQUESTS, Authorization="Basic YWRtaW46cGFzc3dvcmQxMjM0").values()) == {401}
    for headers in ({"Origin": EVIL}, {"Host": "evil.example"}):
        assert set(refused(mlflow, MLFLOW_REQUESTS, **headers).values()) <= {401, 403}
    for table in ("flows", "deployments", "variables", "flow_runs"):
        assert machine.api(f"{table}/count", flows={}) == 0
    login = ("finetune", password(machine))
    found = httpx2.get(f"{mlflow}/api/2.0/mlflow/experiments/search?max_results=9", auth=login).json()
    assert [experiment["name"] for experiment in found["experiments"]] == ["Default"]
    assert httpx2.get(f"{mlflow}/api/2.0/mlflow/registered-models/search", auth=login).json() == {}


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
    login, foreign = ("finetune", password(machine)), {"Host": "evil.example"}
    assert httpx2.get(f"{prefect}/version", auth=login).is_success
    assert httpx2.get(f"{prefect}/version", auth=login, headers=foreign).status_code == 400
    assert httpx2.get(f"{mlflow}/api/2.0/mlflow/experiments/search", auth=login, headers=foreign).status_code == 403
    page = {"Origin": EVIL}
    assert "access-control-allow-origin" not in httpx2.get(f"{prefect}/version", auth=login, headers=page).headers
    own = {"Origin": prefect.removesuffix("/api")}
    allowed = httpx2.get(f"{prefect}/version", auth=login, headers=own).headers["access-control-allow-origin"]
    assert allowed == own["Origin"]


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
    login = ("finetune", password(machine))

    def has_crashed() -> bool:
        now = datetime.now(UTC).isoformat()  # again and again: the server may load the automation after an event
        event = {"event": "silent", "resource": resource, "occurred": now, "id": str(uuid4())}
        assert httpx2.post(f"{addresses(machine)[0]}/events", json=[event], auth=login).status_code == 204
        time.sleep(1)
        return machine.state_of(run) == "Crashed"

    wait_until(has_crashed)


def test_the_password_is_in_one_file_that_only_the_user_can_read(machine: Machine) -> None:
    file, secret = machine.home / "services" / "password", password(machine).encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(secret) >= 32
    holding = [path for path in machine.home.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert holding == [file]
    shown = [pid for pid in of_home(machine.home) if secret in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert shown == []


def test_commands_log_in_by_themselves_and_a_person_is_shown_how(machine: Machine) -> None:
    bare = Machine(machine.home)  # a shell that was not pointed at the servers
    assert bare.finetune("runs").returncode == 0
    shown = bare.finetune("notify")
    assert (shown.returncode, shown.stdout) == (0, "There are no notifications: name a block.\n")
    shown = bare.finetune("status", "--password").stdout
    assert f"Log in to Prefect: finetune:{password(machine)}\n" in shown
    assert f"user finetune, password {password(machine)}\n" in shown


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
