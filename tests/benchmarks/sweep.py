"""A sweep of twelve trials over learning rate, epochs and batch size, next to what its trainings take alone.

The rows are those of the demo: docstrings of installed libraries.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from mlflow import MlflowClient

from tests.benchmarks.subject import Subject
from tests.benchmarks.table import ROOT, Row
from tests.flows.small import command, environment

TIMEOUT_S = 1200.0
TRIALS = 12
STAGES = ("fit", "predict", "score")
SPACE = {
    "training.learning_rate": {"log": [1e-4, 3e-3]},
    "training.num_train_epochs": {"choice": [3, 6, 9]},
    "training.per_device_train_batch_size": {"choice": [16, 32, 64]},
}


class Swept(NamedTuple):
    """A sweep that has ended."""

    seconds: float
    file: Path
    home: Path
    result: dict[str, Any]

    @property
    def stage_seconds(self) -> dict[str, float]:
        """The seconds of each stage of the trials, all trials together."""
        return {
            stage: sum(child.data.metrics.get(f"{stage}/seconds", 0.0) for child in self.trials) for stage in STAGES
        }

    @property
    def own_seconds(self) -> float:
        """Seconds for each trial that none of its stages takes, from the first trial's start to the last one's end."""
        began = min(child.info.start_time for child in self.trials)
        ended = max(child.info.end_time for child in self.trials)
        return ((ended - began) / 1000 - sum(self.stage_seconds.values())) / TRIALS

    @property
    def trials(self) -> list[Any]:
        """The MLflow runs of the trials."""
        client = MlflowClient(f"sqlite:///{self.home / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("demo")
        return list(client.search_runs([experiment.experiment_id], "tags.`sweep.trial` != ''"))


def measure(subject: Subject) -> list[Row]:
    """Ratios of whole commands."""
    every = _sweep(subject.folder, "every", pruner="none")
    at_once = _sweep(subject.folder, "at-once", pruner="none", parallel=2)
    halving = _sweep(subject.folder, "asha", pruner="asha", parallel=2)
    alone_s, other_s, weights = _alone(subject.folder / "sweep-alone", every.file, halving.result["best"]["settings"])
    assert weights == halving.result["run"]["model"]["sha256"], "the best model differs from that of an ordinary run"
    for stage in ("load_data", "load_model", "tokenize"):
        assert len([*every.home.glob(f"artifacts/{stage}/*/manifest.json")]) == 1, stage
    fits = every.stage_seconds["fit"]
    bound = fits + other_s
    states = [trial["state"] for trial in halving.result["trials"]]
    return [
        Row(
            f"a sweep of {TRIALS} trials, two at once / its trainings and the other stages of one run",
            at_once.seconds / bound,
            f"{at_once.seconds:.0f} s; the trainings take {fits:.0f} s one after the other, and the other stages "
            f"{other_s:.0f} of the {alone_s:.0f} s of one run",
            most=1.0,
        ),
        Row(
            "two at once with asha / the same",
            halving.seconds / bound,
            f"{halving.seconds:.0f} s; {states.count('paused')} of {TRIALS} trials were stopped; the best model has "
            "the bytes of an ordinary run with its settings",
            most=0.5,
        ),
        Row("one after the other / the same", every.seconds / bound, f"{every.seconds:.0f} s"),
        Row(
            "own time of a sweep for each trial",
            every.own_seconds,
            f"from the first trial's start to the last one's end, less the stages of {TRIALS} trials",
            "s",
            most=1.0,
        ),
    ]


def _write(file: Path, **sweep: Any) -> Path:
    recipe = yaml.safe_load((ROOT / "deployments" / "demo.yaml").read_text())["definitions"]["recipe"]
    recipe["data"]["limit"] = 1500
    search = {"space": SPACE, "trials": TRIALS, "seed": 1, **sweep}
    parameters = {"recipe": recipe, "sweep": search}
    entries = [
        {"name": "demo", "entrypoint": "flows.sweep:sweep", "parameters": parameters},
        {"name": "demo", "entrypoint": "flows.finetune:finetune", "parameters": {"recipe": recipe}},
    ]
    file.write_text(yaml.safe_dump({"deployments": entries}))
    return file


def _sweep(folder: Path, name: str, **sweep: Any) -> Swept:
    file, home = _write(folder / f"{name}.yaml", **sweep), folder / f"sweep-{name}"
    seconds, result = _run(home, "sweep", file)
    return Swept(seconds, file, home, result)


def _alone(home: Path, file: Path, settings: dict[str, Any]) -> tuple[float, float, str]:
    """The seconds of an ordinary run with these settings, those without `fit`, and its weights."""
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    seconds, result = _run(home, "run", file, *sets)
    fit_s = next(stage["seconds"] for stage in result["stages"] if stage["name"] == "fit")
    return seconds, seconds - fit_s, result["model"]["sha256"]


def _run(home: Path, verb: str, file: Path, *more: str) -> tuple[float, dict[str, Any]]:
    out, began = home.with_suffix(".json"), time.monotonic()
    argv = command(verb, str(file), "--json", str(out), "--quiet", *more)
    run = subprocess.run(argv, cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stdout + run.stderr
    return time.monotonic() - began, json.loads(out.read_text())
