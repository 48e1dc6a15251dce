"""A training on a cluster next to the same on one machine: its start, and its speed.

The cluster has two Ray nodes on this machine, with a process each. It runs already, and has the libraries' files in the
system's cache.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.flows.small import command, environment, write_project
from tests.ray_nodes import ray_nodes
from training.jobs.protocol import EVENTS, read_events

ROUNDS = 5
TIMEOUT_S = 300.0
SETTINGS = (
    *("compute.num_processes=2", "training.num_train_epochs=40", "training.logging_steps=1"),
    *("training.eval_strategy=no", "training.load_best_model_at_end=false", "training.checkpoint_interval_s=600"),
    "release.registry=null",
)
# Steps of some 50 ms, as those of real models are longer still: what a step costs on a cluster counts less.
LONGER = (
    *("model.config.hidden_size=256", "model.config.intermediate_size=1024", "training.logging_steps=10"),
    *("training.num_train_epochs=30", "training.per_device_train_batch_size=30"),
)
ON_CLUSTER = ("compute.cluster=ray", "compute.num_machines=2")


class Timed(NamedTuple):
    """A run."""

    first_step_s: float
    """From the command's start to the end of the first step."""
    rows_per_s: float
    """While it trained, without the first step."""
    weights: str


def measure(subject: Subject) -> list[Row]:
    """Ratios of medians; runs on the cluster and on this machine in turn."""
    file = write_project(subject.folder / "cluster")
    homes = [subject.folder / f"cluster-machine{number}" for number in (1, 2)]
    with ray_nodes(homes) as nodes:
        here, there = _in_turn(subject.folder / "start", file, nodes.address)
        fast_here, fast_there = _in_turn(subject.folder / "speed", file, nodes.address, *LONGER)
    starts, speeds = _medians(here, there, "first_step_s"), _medians(fast_here, fast_there, "rows_per_s")
    how = f"two nodes on this machine; medians of {ROUNDS} in turn; the same weights"
    slowest, fastest = min(run.rows_per_s for run in fast_here), max(run.rows_per_s for run in fast_here)
    return [
        Row(
            "time to the first step on a cluster / two processes of one machine",
            starts[1] / starts[0],
            f"from the start of `finetune run` in a new home, {starts[1]:.1f} and {starts[0]:.1f} s; {how}",
            most=1.3,
        ),
        Row(
            "rows a second on a cluster / two processes of one machine",
            speeds[1] / speeds[0],
            f"{speeds[1]:,.0f} and {speeds[0]:,.0f}, the latter {slowest:,.0f} to {fastest:,.0f}; {how}; the budget is "
            "the slowest run of one machine",
            least=round(slowest / speeds[0], 3),
        ),
    ]


def _in_turn(folder: Path, file: Path, address: str, *settings: str) -> tuple[list[Timed], list[Timed]]:
    """Runs on this machine and on the cluster, which end with the same weights."""
    folder.mkdir()
    here, there = [], []
    for number in range(ROUNDS):
        here.append(_timed(folder / f"here{number}", file, *settings))
        there.append(_timed(folder / f"there{number}", file, *settings, *ON_CLUSTER, address=address))
    weights = {run.weights for run in here + there}
    assert len(weights) == 1, f"the runs end with other weights: {weights}"
    return here, there


def _timed(home: Path, file: Path, *settings: str, address: str = "") -> Timed:
    out, sets = home.with_suffix(".json"), [word for one in (*SETTINGS, *settings) for word in ("--set", one)]
    argv, env = command("run", str(file), "--json", str(out), *sets), environment(home, RAY_ADDRESS=address)
    began = time.time()
    run = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    fit = next(stage for stage in result["stages"] if stage["name"] == "fit")
    events, _ = read_events(home / fit["artifact"] / "log" / EVENTS, 0)
    first = next(event for event in events if event["kind"] == "metrics" and "train_loss" in event["values"])
    speeds = [event for event in events if event["kind"] == "speed" and event["step"] > first["step"]]
    rows = sum(event["rows"] for event in speeds) / sum(event["seconds"] for event in speeds)
    return Timed(first["time"] - began, rows, result["model"]["sha256"])


def _medians(here: list[Timed], there: list[Timed], name: str) -> tuple[float, float]:
    return (
        statistics.median(getattr(run, name) for run in here),
        statistics.median(getattr(run, name) for run in there),
    )
