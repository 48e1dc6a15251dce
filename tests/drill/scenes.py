"""Named scenes: what a team lives with, under `finetune up` with real servers, a schedule and a process worker."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from mlflow.entities import Run

from flows.reports.tables import align
from tasks.tracking.connection import FLOW_RUN_TAG
from tests.drill.nightly import nightly
from tests.drill.promises import judge, require
from tests.drill.serve import serve
from tests.drill.services import kill_services
from tests.flows.small import write_project, write_rows
from tests.hub.server import Hub
from tests.hub.sst2 import MODEL, ROWS, distilbert_files, sst2_files
from tests.machine import ROOT, Machine, of_home, wait_until

EVERY_S = 30
"""Between the runs of the schedule: one comes due while another trains."""
END_WITHIN_S = 900.0
STARTED_BY = {"SCHEDULE": "schedule", "AUTOMATION": "event", "DEPLOYMENT": "schedule", None: "a person"}
OTHER = {"pos": "neg", "neg": "pos"}


def play(name: str, folder: Path) -> str:
    """Plays the scene on a machine of its own in the folder. Returns its result, or FAULT with the error."""
    machine = Machine(folder / name / "home")
    machine.home.mkdir(parents=True, mode=0o700)

    def scene() -> None:
        try:
            SCENES[name](machine)
        finally:
            machine.finetune("down")
            machine.log_out()
        require(not of_home(machine.home), f"down leaves {of_home(machine.home)}")

    return judge(f"scene  {name}", scene)


class Nightly:
    """`retrain/small`, whose schedule is active, and the rows that it looks at."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.table = [["rows", "started by", "flow run ends", "verdict", "champion"]]
        self.met: set[str] = set()
        self._file = write_project(machine.home.parent / "project")
        self._document = yaml.safe_load(self._file.read_text())
        (entry,) = self._document["deployments"]
        recipe = entry["parameters"]["recipe"]
        recipe["release"]["gate"] = {"baseline": False}  # the first model learns from wrong labels, and is worth little
        recipe["training"] |= {"checkpoint_interval_s": 600, "callbacks": ["tests.flows.slowly:HalfAMinute"]}
        entry |= {"entrypoint": "flows.retrain:retrain", "work_pool": {"name": "finetune"}}
        entry["concurrency_limit"] = {"limit": 1, "collision_strategy": "CANCEL_NEW"}
        match = {"prefect.resource.id": "finetune.data.small"}
        parameters = {"reason": "finetune.data.updated"}
        entry["triggers"] = [
            {"type": "event", "expect": ["finetune.data.updated"], "match": match, "parameters": parameters}
        ]
        self._entry = entry

    def write(self, rows: int, noisy: bool) -> None:
        """New rows to train on, at once; noisy: every second label is wrong."""
        file, aside = self._file.parent / "train.csv", self._file.parent / ".train.csv"
        write_rows(aside, rows, seed=1)
        if noisy:
            table = list(csv.reader(aside.read_text().splitlines()))
            for row in table[2::2]:
                row[1] = OTHER[row[1]]
            with aside.open("w", newline="") as out:
                csv.writer(out).writerows(table)
        os.replace(aside, file)

    def deploy(self, active: bool) -> None:
        """Deploys it, scheduled every EVERY_S seconds, or not."""
        self._entry["schedules"] = [{"interval": EVERY_S, "slug": "often", "active": active}]
        self._file.write_text(yaml.safe_dump(self._document))
        deployed = self.machine.finetune("deploy", str(self._file))
        require(deployed.returncode == 0, deployed.stdout + deployed.stderr)

    def runs(self, *types: str) -> list[dict[str, Any]]:
        """The flow runs whose state is of one of these types, the first first."""
        chosen = {"sort": "EXPECTED_START_TIME_ASC", "flow_runs": {"state": {"type": {"any_": list(types)}}}}
        return list(self.machine.api("flow_runs/filter", **chosen))

    def next(self, rows: str, started_by: str, name: str, champion: str) -> None:
        """Waits for the next flow run that ends in the state of that name, and adds it to the table. Until
        changed rows are met, there may be runs that found them unchanged."""
        found: list[dict[str, Any]] = []

        def has_ended() -> bool:
            for run in self.runs("COMPLETED", "FAILED", "CRASHED"):
                state = run["state"]
                if run["id"] in self.met or found:
                    continue
                self.met.add(run["id"])
                require(
                    state["name"] in (name, "Unchanged"), f"{rows}: {run['id']} {state['name']}: {state['message']}"
                )
                require(state["name"] != "Unchanged" or self.verdict(run["id"]) is None, f"{rows}: it is in MLflow")
                if state["name"] == name:
                    found.append(run)
            return bool(found)

        wait_until(has_ended, END_WITHIN_S)
        (run,) = found
        by = STARTED_BY[run["created_by"]["type"] if run["created_by"] else None]
        require(by == started_by, f"{rows}: {run['id']} was started by {by}")
        jobs, judged = list(self.machine.home.glob("jobs/*/job.json")), self.verdict(run["id"])
        require(not jobs, f"{rows}: jobs are left: {jobs}")
        require((judged is None) == (name == "Unchanged"), f"{rows}: MLflow has {judged}")
        require(self.champion() == champion, f"{rows}: the champion is {self.champion()}, not {champion}")
        self.table.append([rows, started_by, name, (judged or "nothing trained").partition(":")[0], champion])
        print(align(self.table)[-1], flush=True)
        if judged:
            print(f"  {judged}", flush=True)

    def verdict(self, flow_run: str) -> str | None:
        """The gate's decision in MLflow; None where it has no run of the flow run."""
        runs = [run for run in self.tracked() if run.data.tags[FLOW_RUN_TAG] == flow_run]
        require(len(runs) < 2, f"MLflow has {len(runs)} runs of {flow_run}")
        return f"{runs[0].data.tags['gate.decision']}: {runs[0].data.tags['gate.reason']}" if runs else None

    def tracked(self) -> list[Run]:
        """All that MLflow has run."""
        client = self.machine.mlflow()
        experiment = client.get_experiment_by_name("small")
        return list(client.search_runs([experiment.experiment_id])) if experiment else []

    def champion(self) -> str:
        """The version with the alias."""
        client = self.machine.mlflow()
        return f"small/{client.get_model_version_by_alias('small', 'champion').version}"


def retrain(machine: Machine) -> None:
    """A schedule over rows that change, an event, and two at once. Raises Broken where one is not as promised."""
    machine.up()
    nightly = Nightly(machine)
    nightly.write(240, noisy=True)
    nightly.deploy(active=True)
    nightly.next("the first, half of them wrong", "schedule", "Completed", "small/1")
    nightly.next("unchanged", "schedule", "Unchanged", "small/1")
    nightly.write(240, noisy=False)
    nightly.next("better", "schedule", "Completed", "small/2")
    nightly.next("unchanged", "schedule", "Unchanged", "small/2")
    nightly.write(300, noisy=True)
    nightly.next("worse", "schedule", "Completed", "small/2")
    nightly.next("unchanged", "schedule", "Unchanged", "small/2")
    nightly.deploy(active=False)
    wait_until(lambda: not nightly.runs("RUNNING", "PENDING"), END_WITHIN_S)
    nightly.met |= {run["id"] for run in nightly.runs("COMPLETED")}
    cancelled = len(nightly.runs("CANCELLED"))
    require(cancelled > 0, "no run of the schedule came due while another trained")

    nightly.write(260, noisy=False)
    command = machine.finetune("data-updated", "small")
    require(command.returncode == 0 and "retrain/small: " in command.stdout, command.stdout + command.stderr)
    wait_until(lambda: bool(nightly.runs("RUNNING")), END_WITHIN_S)
    second = machine.start("retrain/small", {})
    wait_until(lambda: machine.state_of(second) == "Cancelled")
    nightly.next("more", "event", "Completed", "small/2")
    (left,) = nightly.runs("CANCELLED")[cancelled:]
    require(left["id"] == second, f"{left['id']} was cancelled, not {second}")
    waiting = nightly.runs("SCHEDULED", "PENDING", "RUNNING", "PAUSED")
    require(not waiting, f"these wait: {[run['id'] for run in waiting]}")
    print(*align(nightly.table), sep="\n")
    print(f"cancelled while another went on: {cancelled} of the schedule, 1 by hand; waiting at the end: 0", flush=True)


def sst2(machine: Machine) -> None:
    """The shipped file, unchanged, deployed and run against a stand-in for the Hub; then with another rate."""
    with Hub() as hub:
        commits = {ROWS: hub.repo("dataset", ROWS, sst2_files())}
        commits[MODEL] = hub.repo("model", MODEL, distilbert_files(machine.home.parent / "distilbert"))
        machine.env |= hub.environment(machine.home.parent / "hub")
        machine.up()
        deployed = machine.finetune("deploy", str(ROOT / "deployments" / "sst2.yaml"))
        require(deployed.returncode == 0, deployed.stdout + deployed.stderr)
        table = [["parameters", "flow run ends", "learning rate", "registered", "verdict"]]
        for rate, more in (("2e-05", []), ("3e-05", ["-p", 'overrides={"training.learning_rate": 3e-5}'])):
            watched(machine, "finetune/sst2", *more)
            client = machine.mlflow()
            experiment = client.get_experiment_by_name("sst2")
            run = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])[0]
            found = run.data.params["training.learning_rate"]
            require(float(found) == float(rate), f"the learning rate is {found}, not {rate}")
            state = machine.state_of(run.data.tags[FLOW_RUN_TAG])
            version = client.search_model_versions(f"name = 'sst2' and run_id = '{run.info.run_id}'")[0]
            decision = run.data.tags["gate.decision"]
            table.append([more[-1] if more else "as shipped", state, found, f"sst2/{version.version}", decision])
        tags = client.get_model_version("sst2", "1").tags
        pinned = {ROWS: tags["finetune.data_commit"], MODEL: tags["finetune.base_model_commit"]}
        require(pinned == commits, f"made of {pinned}, not of {commits}")
        print(*align(table), sep="\n", flush=True)


def watched(machine: Machine, deployment: str, *more: str) -> None:
    """Has the worker run the deployment, and Prefect's own command wait for its end, which must be Completed."""
    argv = [sys.executable, "-m", "prefect", "--no-prompt", "deployment", "run", deployment, *more, "--watch"]
    env = {**os.environ, **machine.env, "FINETUNE_HOME": str(machine.home)}
    run = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=END_WITHIN_S)
    require(run.returncode == 0, f"{deployment} ends with {run.returncode}: {run.stdout}{run.stderr}")


SCENES: dict[str, Callable[[Machine], None]] = {
    "services": kill_services,
    "retrain": retrain,
    "nightly": nightly,
    "sst2": sst2,
    "serve": serve,
}
