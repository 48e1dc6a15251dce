"""A machine on which `finetune up` runs, seen from a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx2
import yaml
from mlflow import MlflowClient

from tests import fork_server
from tests.flows import forked, small
from tests.servers import closed_port
from tests.waiting import wait_until as wait_until
from training.jobs.processes import variable

ROOT = Path(__file__).resolve().parents[1]
MLFLOW_LOGIN = "MLFLOW_TRACKING_"


def of_home(home: Path) -> list[int]:
    """The processes that were started for this home."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if variable(pid, "FINETUNE_HOME") == str(home)]


class Machine:
    """A shell over this home, with a Prefect home and ports of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {"PREFECT_HOME": f"{home}-prefect", "PYTHONPATH": str(ROOT), "PREFECT_API_URL": ""}
        self.env["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = ""
        self.ports = ["--prefect-port", str(closed_port()), "--mlflow-port", str(closed_port())]

    def finetune(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        if fork_server.FOLDER not in os.environ:  # in a drill or a benchmark
            return small.finetune(self.home, *arguments, **self.env)
        return forked.finetune(self.home, *arguments, python=fork_server.NEW_PYTHON, **self.env)

    def up(self) -> None:
        """Starts the servers and the worker, and points the shell at them."""
        up = self.finetune("up", "--detach", *self.ports)
        assert up.returncode == 0, up.stdout + up.stderr
        shown = self.finetune("status", "--env").stdout
        self.env |= dict(line.removeprefix("export ").split("=", 1) for line in shown.splitlines())

    def deploy(self, file: Path) -> None:
        """Deploys the one entry of the file to the work pool of `up`."""
        document = yaml.safe_load(file.read_text())
        (entry,) = document["deployments"]
        entry["work_pool"] = {"name": "finetune"}
        mine = self.home.parent / f"{self.home.name}-{file.name}"
        mine.write_text(yaml.safe_dump(document))
        deployed = self.finetune("deploy", str(mine))
        command = f"prefect deployment run finetune/{entry['name']}"
        assert deployed.returncode == 0 and command in deployed.stdout, deployed.stderr

    def start(self, deployment: str, overrides: Mapping[str, Any]) -> str:
        """Has the worker run the deployment; gives the flow run."""
        printed = self.prefect("deployment", "run", deployment, "-p", f"overrides={json.dumps(overrides)}")
        found = re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", printed)
        assert found is not None, printed
        return found.group()

    def prefect(self, *arguments: str) -> str:
        argv = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        env = {**os.environ, **self.env, "FINETUNE_HOME": str(self.home), "COLUMNS": "200"}
        run = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def api(self, path: str, **body: Any) -> Any:
        """The Prefect server's response, to a POST if there is a body.

        A busy server answers 503, or not in time. The request is then made again, as Prefect's own client does.
        """
        url, user = f"{self.env['PREFECT_API_URL']}/{path}", self.env["PREFECT_API_AUTH_STRING"].split(":", 1)
        with httpx2.Client(auth=(user[0], user[1]), timeout=30) as client:
            for wait_s in (1, 2, 4, 8, 0):
                try:
                    response = client.post(url, json=body) if body else client.get(url)
                except httpx2.ReadTimeout:
                    if not wait_s:
                        raise
                else:
                    if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                        break
                time.sleep(wait_s)
        return response.raise_for_status().json()

    def mlflow(self) -> MlflowClient:
        """A client of the MLflow server. This process is logged in until `log_out`."""
        os.environ.update({name: value for name, value in self.env.items() if name.startswith(MLFLOW_LOGIN)})
        return MlflowClient(self.env["MLFLOW_TRACKING_URI"])

    def log_out(self) -> None:
        """Removes the login from the environment: clients of another machine would use it."""
        for name in [name for name in os.environ if name.startswith(MLFLOW_LOGIN)]:
            del os.environ[name]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of this name that the Prefect server has stored."""
        return list(self.api("events/filter", filter={"event": {"name": [name]}})["events"])

    def state_of(self, flow_run: str) -> str:
        return str(self.api(f"flow_runs/{flow_run}")["state_name"])

    def trains(self) -> bool:
        """Whether a training has come as far as a checkpoint."""
        return any(self.home.glob("jobs/*/checkpoints/checkpoint-*"))
