"""The cost of a flow without its stages, on a running Prefect server."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from tasks import servers
from tasks.services.prefect_server import ensure_prefect_server
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.flows.small import finetune, write_project
from tests.machine import Machine
from tests.waiting import wait_until
from training.jobs.protocol import EVENTS

COMPLETED = "recipes/small/completed.json"
END_WITHIN_S = 600.0


@dataclass(frozen=True)
class Ran:
    """One `finetune run`: the command's wall time and its result."""

    wall_s: float
    result: dict[str, Any]
    home: Path

    @property
    def outside_s(self) -> float:
        """The seconds outside the stages: Python's start, imports, Prefect, MLflow."""
        return self.wall_s - sum(stage["seconds"] for stage in self.result["stages"])

    @property
    def children_s(self) -> dict[str, float]:
        """The seconds of the stages that had a child program."""
        flow_run = self.result["flow_run_id"]
        return {
            stage["name"]: stage["seconds"]
            for stage in self.result["stages"]
            if (self.home / (stage["artifact"] or f"runs/{flow_run}/{stage['name']}") / "log" / EVENTS).is_file()
        }


@dataclass(frozen=True)
class Project:
    """A recipe whose stages have next to nothing to do, and the home in which it ran."""

    file: Path
    home: Path
    first: Ran


def measure(subject: Subject) -> list[Row]:
    """The cost of a first run, of a later one with all stages made anew, of the children inside the stages, and of a
    run through a worker."""
    project = finished_project(subject.folder)
    first, again = project.first, run_project(project.file, project.home, "--force", "all")
    return [
        Row(
            "a flow beside its stages",
            again.outside_s,
            f"`finetune run --force all`, {len(again.result['stages'])} stages, {again.wall_s:.1f} s from the "
            "command's start to its end, on a running server",
            unit="s",
            most=5.0,
        ),
        Row(
            "a flow beside its stages, first run of a home",
            first.outside_s,
            f"the same, and MLflow's database is made; {first.wall_s:.1f} s in all",
            unit="s",
        ),
        Row(
            "starts and imports inside the stages",
            sum(first.children_s.values()),
            "the first run's stages with a child program, whose work is next to nothing: "
            + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in first.children_s.items()),
            unit="s",
        ),
        *through_a_worker(subject.folder / "worker"),
    ]


def through_a_worker(folder: Path) -> list[Row]:
    """The same of a deployment's run under `finetune up`, whose process the worker starts."""
    machine = Machine(folder / "home")
    machine.home.mkdir(mode=0o700, parents=True)
    try:
        machine.up()
        machine.deploy(write_project(folder / "project"))
        machine.start("finetune/small", {"training.num_train_epochs": 1})  # makes what only a first run makes
        wait_until(lambda: (machine.home / COMPLETED).is_file(), END_WITHIN_S)
        run = machine.start("finetune/small", {})
        wait_until(lambda: machine.state_of(run) == "Completed", END_WITHIN_S)
        flow_run = machine.api(f"flow_runs/{run}")
        stages = json.loads((machine.home / COMPLETED).read_text())["stages"]
    finally:
        machine.finetune("down")
    scheduled, began = (datetime.fromisoformat(flow_run[name]) for name in ("expected_start_time", "start_time"))
    return [
        Row(
            "a flow through a worker, beside its stages",
            flow_run["total_run_time"] - sum(stage["seconds"] for stage in stages),
            f"`prefect deployment run`, {flow_run['total_run_time']:.1f} s from Running to Completed",
            unit="s",
            most=5.0,
        ),
        Row(
            "from asking a worker until the flow runs",
            (began - scheduled).total_seconds(),
            "it asks the server every 2 s, and starts a process that imports the flow",
            unit="s",
        ),
    ]


@cache
def finished_project(folder: Path) -> Project:
    """The small recipe, run once on a server that was started before."""
    file, home = write_project(folder / "small"), folder / "small-home"
    return Project(file, home, run_project(file, home))


def run_project(file: Path, home: Path, *arguments: str) -> Ran:
    """Runs the recipe as a person would. Raises RuntimeError where it fails."""
    out, server = file.with_suffix(".json"), ensure_prefect_server()
    began = time.monotonic()
    login = {"PREFECT_API_URL": server, "PREFECT_API_AUTH_STRING": servers.auth_string()}
    done = finetune(home, "run", str(file), "--json", str(out), *arguments, **login)
    wall_s = time.monotonic() - began
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return Ran(wall_s, json.loads(out.read_text()), home)
