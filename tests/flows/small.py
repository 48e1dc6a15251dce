"""A recipe whose every stage takes seconds: generated reviews, an encoder of some thousand weights."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

GOOD, BAD = ["good", "great", "lovely", "fine", "superb"], ["bad", "awful", "poor", "dull", "grim"]
FILLER = ["the", "film", "was", "very", "and", "a", "plot", "actor", "scene", "with", "some", "of", "it"]


@dataclass(frozen=True)
class FinishedRun:
    """A home in which the small recipe ran to its end, and the output of the run."""

    home: Path
    file: Path
    result: dict[str, Any]
    printed: str


def write_rows(path: Path, rows: int, seed: int) -> None:
    """A CSV file of texts whose label hangs on one word, and of a genre that is independent of the label."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label", "genre"])
        for number in range(rows):
            label, words = draw.choice([("pos", GOOD), ("neg", BAD)])
            text = [draw.choice(FILLER) for _ in range(draw.randint(3, 16))] + [draw.choice(words)]
            draw.shuffle(text)
            table.writerow([" ".join(text), label, ("drama", "horror", "comedy")[number % 3]])


def write_project(folder: Path) -> Path:
    """Rows and a deployment file in the folder; gives the file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.csv", 240, seed=1)
    write_rows(folder / "validation.csv", 60, seed=2)
    recipe: dict[str, Any] = {
        "name": "small",
        "task": "sequence-classification",
        "data": {"source": "csv", "path": str(folder), "text": ["text"], "label": "label"},
        "model": {
            "source": "scratch",
            "config": {
                "model_type": "bert",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "vocab_size": 300,
                "max_position_embeddings": 64,
            },
        },
        "tokens": {"max_length": 32},
        "training": {
            "num_train_epochs": 8,
            "learning_rate": 5e-3,
            "per_device_train_batch_size": 16,
            "metric_for_best_model": "accuracy",
            "checkpoint_interval_s": 0.3,
        },
        "evaluation": {"splits": ["validation"], "metrics": ["accuracy", "f1", "precision", "recall"]},
        "release": {"registry": "small", "gate": {"minimum": {"accuracy": 0.5}}},
    }
    entry = {"name": "small", "entrypoint": "flows.finetune:finetune", "parameters": {"recipe": recipe}}
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump({"deployments": [entry]}, sort_keys=False))
    return file


def command(*arguments: str) -> list[str]:
    """The command line of `finetune`."""
    return [sys.executable, "-c", "from flows.cli.main import start; start()", *arguments]


def environment(home: Path, **more: str) -> dict[str, str]:
    """A shell in which everything is stored under `home`."""
    return {**os.environ, "FINETUNE_HOME": str(home), **more}


def finetune(home: Path, *arguments: str, timeout_s: float = 300, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs `finetune` as a person would."""
    return subprocess.run(
        command(*arguments), env=environment(home, **more), capture_output=True, text=True, timeout=timeout_s
    )


def states(out: Path) -> dict[str, str]:
    """Stage to state, of a result file."""
    return {stage["name"]: stage["state"] for stage in json.loads(out.read_text())["stages"]}


def artifact_of(home: Path, result: dict[str, Any], stage: str) -> Path:
    """The folder of a stage's artifact, from the result of a run."""
    (artifact,) = (row["artifact"] for row in result["stages"] if row["name"] == stage)
    return home / artifact
