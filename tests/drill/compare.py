"""The results of a finished run, and their differences from those of another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.tracking.connection import FLOW_RUN_TAG
from training.jobs.protocol import read_events

Curve = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class Left:
    """All that must be the same however often a run was killed on its way."""

    model: str
    """sha256 of the weights."""
    registered: str | None
    artifacts: Mapping[str, list[str]]
    """Stage to key and digest."""
    metrics: Mapping[str, Any]
    curve: Curve
    """Figure to its (step, value) while training."""

    def differences(self, other: Left) -> list[str]:
        """A line for each thing in which the other is not the same."""
        lines = []
        for name, here in vars(self).items():
            there = getattr(other, name)
            if isinstance(here, Mapping):
                names = [key for key in {**here, **there} if here.get(key) != there.get(key)]
                lines += [f"{name}.{key}: {here.get(key)} and {there.get(key)}" for key in names]
            elif here != there:
                lines.append(f"{name}: {here} and {there}")
        return lines


def left_by(home: Path, result: Mapping[str, Any]) -> Left:
    """The results that the completed run left in its home."""
    artifacts, curve = {}, {}
    for stage in result["stages"]:
        if stage["artifact"]:
            manifest = json.loads((home / stage["artifact"] / "manifest.json").read_text())
            artifacts[stage["name"]] = [manifest["ref"]["key"], manifest["ref"]["digest"]]
        if stage["name"] == "fit":
            curve = curve_of(home / stage["artifact"] / "log" / "events.jsonl")
    model = result["model"]
    return Left(model["sha256"], model["registered"], artifacts, result["metrics"], curve)


def curve_of(events: Path) -> Curve:
    """The figures of a training, from its events."""
    curve: Curve = {}
    for event in read_events(events, 0)[0]:
        for name, value in event["values"].items() if event["kind"] == "metrics" else ():
            curve.setdefault(name, []).append((event["step"], value))
    return curve


def tracking_faults(home: Path, result: Mapping[str, Any], curve: Curve) -> list[str]:
    """Mistakes in MLflow. Expected: one closed run a flow run, each point of the last one's curve once, one version."""
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    faults = _run_faults(runs, _begun(home), result["flow_run_id"])
    for name, points in curve.items():
        history = [
            (point.step, point.value) for point in client.get_metric_history(result["mlflow_run_id"], f"fit/{name}")
        ]
        # At step 0 a stage's own figures are kept, one of which has the name of a curve.
        if sorted(point for point in history if point[0]) != sorted(points):
            faults.append(f"MLflow has {len(history)} points of fit/{name}, not the {len(points)} of the training")
    if result["model"]["registered"]:
        versions = client.search_model_versions("name = 'small'")
        if len(versions) != 1:
            faults.append(f"one model was registered as versions {[version.version for version in versions]}")
        elif (
            odd := {"finetune.model_digest", "finetune.max_length", "finetune.predict.digest"} - versions[0].tags.keys()
        ):
            faults.append(f"version {versions[0].version} lacks the tags {sorted(odd)}")
    return faults


def _begun(home: Path) -> set[str]:
    """The flow runs that recorded their start: one killed within its first moments has nothing to be tracked."""
    return {path.parent.name for path in home.glob("runs/*/outbox.jsonl") if b'"start"' in path.read_bytes()}


def _run_faults(runs: list[Run], begun: set[str], last: str) -> list[str]:
    by_flow_run = [run.data.tags.get(FLOW_RUN_TAG, "none") for run in runs]
    faults = []
    if sorted(by_flow_run) != sorted(begun):
        faults.append(f"MLflow has the flow runs {sorted(by_flow_run)}, not each of {sorted(begun)} once")
    for run, flow_run in zip(runs, by_flow_run, strict=True):
        status = run.info.status
        if status not in ("FINISHED",) if flow_run == last else status not in ("KILLED", "FAILED", "FINISHED"):
            faults.append(f"the MLflow run of flow run {flow_run} is {status}")
    return faults
