"""`finetune run` against a training script that does without the project, both from the same files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pyarrow.parquet as pq
import yaml

from tests.benchmarks.subject import BATCH_ROWS, KIND, MAX_TOKENS, Subject
from tests.benchmarks.table import Row
from tests.flows.small import finetune

EPOCHS, LEARNING_RATE, SEED = 2, 5e-5, 42


def measure(subject: Subject) -> list[Row]:
    """Speed and accuracy of two whole trainings; nothing without a script to compare with."""
    if subject.peer is None:
        return []
    ours, theirs = _ours(subject), _theirs(subject)
    count = pq.read_metadata(subject.data / "validation.parquet").num_rows
    error = 100 * (theirs["accuracy"] * (1 - theirs["accuracy"]) / count) ** 0.5
    return [
        Row(
            "training / the plain script",
            ours["rate"] / theirs["train_samples_per_second"],
            f"{EPOCHS} epochs each, the script in fp32; `auto` came to {ours['precision']} here; "
            f"{ours['rate']:.0f} and {theirs['train_samples_per_second']:.0f} rows/s",
            # The budget is for hardware that computes in 16 bits.
            least=None if ours["precision"] == "no" else 2.5,
        ),
        Row(
            "accuracy above the plain script's",
            100 * (ours["accuracy"] - theirs["accuracy"]),
            f"{ours['accuracy']:.2%} and {theirs['accuracy']:.2%} of {count:,} rows, seed {SEED}; the budget is one "
            "standard error",
            unit="points",
            least=-round(error, 2),
        ),
        Row(
            "`finetune run` / the plain script, from start to end",
            theirs["wall_s"] / ours["wall_s"],
            f"{ours['wall_s']:.0f} s with checks, tracking, scoring; {theirs['wall_s']:.0f} s",
        ),
    ]


def _ours(subject: Subject) -> dict[str, Any]:
    recipe = {
        "name": "peer",
        "kind": KIND,
        "data": {"source": "parquet", "path": str(subject.data.resolve()), "text": ["text"], "label": "label"},
        "model": {"source": "folder", "path": str(subject.base["model"].resolve())},
        "tokens": {"max_length": MAX_TOKENS},
        "training": {
            "num_train_epochs": EPOCHS,
            "learning_rate": LEARNING_RATE,
            "per_device_train_batch_size": BATCH_ROWS,
            "per_device_eval_batch_size": 2 * BATCH_ROWS,
            "seed": SEED,
            # As the script: what is measured is training, and the last model is judged.
            "eval_strategy": "no",
            "load_best_model_at_end": False,
        },
        "evaluation": {"splits": ["validation"], "metrics": ["accuracy"]},
    }
    file, home, out = subject.folder / "peer.yaml", subject.folder / "peer-home", subject.folder / "peer.json"
    entry = {"name": "peer", "entrypoint": "flows.finetune:finetune", "parameters": {"recipe": recipe}}
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    began = time.monotonic()
    done = finetune(home, "run", str(file), "--json", str(out), timeout_s=7200)
    wall_s = time.monotonic() - began
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    result = json.loads(out.read_text())
    (fit,) = (home / stage["artifact"] for stage in result["stages"] if stage["name"] == "fit")
    return {
        "rate": json.loads((fit / "manifest.json").read_text())["ref"]["figures"]["train_samples_per_second"],
        "precision": json.loads((fit / "ingredients.json").read_text())["compute.mixed_precision"],
        "accuracy": result["metrics"]["validation"]["accuracy"]["value"],
        "wall_s": wall_s,
    }


def _theirs(subject: Subject) -> dict[str, Any]:
    argv = [sys.executable, str(subject.peer), "--model", str(subject.base["model"]), "--data", str(subject.data)]
    argv += ["--epochs", str(EPOCHS), "--lr", str(LEARNING_RATE), "--seed", str(SEED), "--batch", str(BATCH_ROWS)]
    argv += ["--max-length", str(MAX_TOKENS), "--out", str(subject.folder / "peer-out")]
    began = time.monotonic()
    printed = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {**json.loads(printed.splitlines()[-1]), "wall_s": time.monotonic() - began}
