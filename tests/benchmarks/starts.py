"""How long commands and flows take that find nothing to do."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import yaml

from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.flows.small import command, environment, finetune, write_project
from tests.machine import Machine
from tests.waiting import wait_until

ROUNDS = 5
END_WITHIN_S = 120.0


def measure(subject: Subject) -> list[Row]:
    """Wall seconds of the help, of a first and of a second Prefect server in a home, and of an unchanged recipe as a
    command, as a plan, and as a flow run of a worker."""
    folder = subject.folder / "starts"
    home, file = folder / "home", write_project(folder / "project")
    ran = finetune(home, "run", str(file))
    if ran.returncode != 0:
        raise RuntimeError(ran.stdout + ran.stderr)
    commands = {
        "`finetune --help`": (["--help"], "Fine-tune", 0.3),
        "nothing changed: `finetune run`": (["run", str(file)], "Nothing changed", 1.0),
        "nothing changed: `finetune plan`": (["plan", str(file)], "Nothing changed", 1.0),
    }
    walls_s: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):  # in turn, so that a busy moment of the machine does not fall on one of them
        for name, (arguments, expected, _) in commands.items():
            walls_s[name].append(_time(home, arguments, expected))
    rows = [_row(name, walls_s[name], budget_s) for name, (_, _, budget_s) in commands.items()]
    return [*rows, *_measure_servers(folder), *_measure_worker(folder, home, file)]


def _time(home: Path, arguments: Sequence[str], expected: str) -> float:
    began = time.monotonic()
    done = subprocess.run(command(*arguments), env=environment(home), capture_output=True, text=True, timeout=120)
    wall_s = time.monotonic() - began
    if done.returncode != 0 or expected not in done.stdout:
        raise RuntimeError(done.stdout + done.stderr)
    return wall_s


def _measure_servers(folder: Path) -> list[Row]:
    """The Prefect server of a run: in a new home, and in one that has its database."""
    program = """
import time
from tasks.services.prefect_server import ensure_prefect_server
import prefect.settings
began = time.monotonic()
ensure_prefect_server()
print(time.monotonic() - began)
"""
    first_s, later_s = [], []
    for number in range(ROUNDS):
        home = folder / f"server-{number}"
        for walls_s in (first_s, later_s):
            done = subprocess.run(
                [sys.executable, "-c", program], env=environment(home), capture_output=True, text=True, check=True
            )
            walls_s.append(float(done.stdout))
        shutil.rmtree(home)
    return [
        _row("a run's Prefect server, new home", first_s),
        _row("a run's Prefect server, home with a database", later_s),
    ]


def _measure_worker(folder: Path, home: Path, file: Path) -> list[Row]:
    """Flow runs of `retrain` through the worker of `finetune up`."""
    document = yaml.safe_load(file.read_text())
    (entry,) = document["deployments"]
    entry |= {"entrypoint": "flows.retrain:retrain", "work_pool": {"name": "finetune"}}
    deployment = folder / "retrain.yaml"
    deployment.write_text(yaml.safe_dump(document))
    machine = Machine(home)
    runs = []
    try:
        machine.up()
        deployed = machine.finetune("deploy", str(deployment))
        if deployed.returncode != 0:
            raise RuntimeError(deployed.stdout + deployed.stderr)
        for _ in range(ROUNDS):
            run = machine.start("retrain/small", {})
            wait_until(lambda run=run: machine.state_of(run) == "Unchanged", END_WITHIN_S)
            runs.append(machine.api(f"flow_runs/{run}"))
    finally:
        machine.finetune("down")
    waits_s = [_seconds(run["expected_start_time"], run["start_time"]) for run in runs]
    return [
        _row("`retrain` that finds nothing, from Running to Completed", [run["total_run_time"] for run in runs], 4.0),
        _row("from a start by hand until the worker's flow runs", waits_s),
    ]


def _seconds(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def _row(name: str, walls_s: Sequence[float], budget_s: float | None = None) -> Row:
    how = f"median of {len(walls_s)}; {min(walls_s):.2f} to {max(walls_s):.2f} s"
    return Row(name, statistics.median(walls_s), how, unit="s", most=budget_s)
