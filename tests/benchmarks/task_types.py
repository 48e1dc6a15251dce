"""Each task type on real rows: the recipes of recipes/, from start to end, in minutes on two cores.

What each must reach is its own gate. A recipe names sets of rows by their folders, the pretrained model as `encoder`,
and the model of a recipe before it by that one's name, such as `models/gsm8k-texts`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.flows.small import command, environment

RECIPES = ("mrpc", "ag-news", "multi30k", "shakespeare", "shakespeare-masked", "gsm8k-texts", "gsm8k")
FOLDER = Path(__file__).with_name("recipes")


def measure(subject: Subject) -> list[Row]:
    """The figures of the exported models; nothing without sets of rows and a pretrained model."""
    if subject.sets is None or subject.own_model is None:
        return []
    place = subject.folder / "task types"
    (place / "models").mkdir(parents=True)
    for rows in subject.sets.iterdir():
        (place / rows.name).symlink_to(rows.resolve())
    (place / "encoder").symlink_to(subject.own_model.resolve())
    figures = []
    for name in RECIPES:
        print(name, end=" ", file=sys.stderr, flush=True)
        figures += _figures(place, FOLDER / f"{name}.yaml")
    return figures


def _figures(place: Path, file: Path) -> list[Row]:
    recipe = yaml.safe_load(file.read_text())["deployments"][0]["parameters"]["recipe"]
    wall_s, cpu_s, result = _run(place, file)
    (fit,) = (place / "home" / stage["artifact"] for stage in result["stages"] if stage["name"] == "fit")
    (place / "models" / recipe["name"]).symlink_to(fit / "model")
    split = recipe["evaluation"]["splits"][-1]
    gate, found = recipe["release"]["gate"], result["metrics"][split]
    steps = json.loads((fit / "manifest.json").read_text())["ref"]["result"]["steps"]
    note = f"{recipe['task']}; {steps:,} steps; {wall_s / 60:.1f} minutes in all, {cpu_s / 60:.1f} of CPU"
    return [
        Row(
            f"{recipe['name']}: {metric} of {split}",
            found[metric]["value"],
            note,
            least=gate.get("minimum", {}).get(metric),
            most=gate.get("maximum", {}).get(metric),
        )
        for metric in recipe["evaluation"]["metrics"]
    ]


def _run(place: Path, file: Path) -> tuple[float, float, dict[str, Any]]:
    """`finetune run`: seconds, seconds of CPU, and its result."""
    out = place / f"{file.stem}.json"
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command("run", str(file), "--json", str(out)),
        cwd=place,
        env=environment(place / "home") | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=7200,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, cpu_s, json.loads(out.read_text())
