"""`finetune run` against a training script that does without the project, both from the same files, over some seeds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tests.benchmarks.subject import BATCH_ROWS, KIND, MAX_TOKENS, Subject
from tests.benchmarks.table import Row
from tests.flows.small import finetune

EPOCHS, LEARNING_RATE, SEEDS = 2, 5e-5, (42, 43, 44)


def measure(subject: Subject) -> list[Row]:
    """Speed and accuracy of whole trainings; nothing without a script to compare with."""
    if subject.peer is None:
        return []
    ours, theirs = zip(*((_ours(subject, seed), _theirs(subject, seed, "bf16")) for seed in SEEDS), strict=True)
    in_fp32 = _theirs(subject, SEEDS[0], "no")
    native = ours[0]["precision"] != "no"  # the budgets are for hardware that computes in 16 bits
    rate, bf16_rate = (statistics.mean(run["rate"] for run in runs) for runs in (ours, theirs))
    gain, noise = _gain([run["accuracy"] for run in ours], [run["accuracy"] for run in theirs])
    seeds = ", ".join(map(str, SEEDS))
    return [
        Row(
            "training / the plain script in fp32",
            rate / in_fp32["rate"],
            f"{EPOCHS} epochs; `auto` came to {ours[0]['precision']} here; {rate:.0f} rows/s, mean of seeds {seeds}, "
            f"and {in_fp32['rate']:.0f}",
            least=2.5 if native else None,
        ),
        Row(
            "training / the plain script in bf16",
            rate / bf16_rate,
            f"the script does not group by length; {rate:.0f} and {bf16_rate:.0f} rows/s, means of seeds {seeds}",
            least=1.8 if native else None,
        ),
        Row(
            "accuracy above the plain script's in bf16",
            100 * gain,
            f"{_percentages(ours)} and {_percentages(theirs)} by seed ({_percentages([in_fp32])} in fp32); the budget "
            "is twice the standard error of the difference of the means",
            unit="points",
            least=-round(200 * noise, 2),
        ),
        Row(
            "`finetune run` / the plain script in fp32, from start to end",
            in_fp32["wall_s"] / ours[0]["wall_s"],
            f"{ours[0]['wall_s']:.0f} s with checks, tracking, scoring; {in_fp32['wall_s']:.0f} s",
        ),
    ]


def _gain(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The difference of the means, and its standard error over the seeds."""
    noise = sum(statistics.variance(found) / len(found) for found in (ours, theirs)) ** 0.5
    return statistics.mean(ours) - statistics.mean(theirs), noise


def _percentages(runs: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{run['accuracy']:.1%}" for run in runs)


def _ours(subject: Subject, seed: int) -> dict[str, Any]:
    recipe = {
        "name": "peer",
        "task": KIND,
        "data": {"source": "parquet", "path": str(subject.data.resolve()), "text": ["text"], "label": "label"},
        "model": {"source": "folder", "path": str(subject.base["model"].resolve())},
        "tokens": {"max_length": MAX_TOKENS},
        "training": {
            "num_train_epochs": EPOCHS,
            "learning_rate": LEARNING_RATE,
            "per_device_train_batch_size": BATCH_ROWS,
            "per_device_eval_batch_size": 2 * BATCH_ROWS,
            "seed": seed,
            # As the script: what is measured is training, and the last model is judged.
            "eval_strategy": "no",
            "load_best_model_at_end": False,
        },
        "evaluation": {"splits": ["validation"], "metrics": ["accuracy"]},
    }
    file, home, out = subject.folder / "peer.yaml", subject.folder / f"peer-home-{seed}", subject.folder / "peer.json"
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
        "rate": json.loads((fit / "manifest.json").read_text())["ref"]["result"]["train_rows_per_second"],
        "precision": json.loads((fit / "inputs.json").read_text())["compute.mixed_precision"],
        "accuracy": result["metrics"]["validation"]["accuracy"]["value"],
        "wall_s": wall_s,
    }


def _theirs(subject: Subject, seed: int, precision: str) -> dict[str, Any]:
    argv = [sys.executable, str(subject.peer), "--model", str(subject.base["model"]), "--data", str(subject.data)]
    argv += ["--epochs", str(EPOCHS), "--lr", str(LEARNING_RATE), "--seed", str(seed), "--batch", str(BATCH_ROWS)]
    argv += ["--max-length", str(MAX_TOKENS), "--out", str(subject.folder / "peer-out")]
    began = time.monotonic()
    # As under `accelerate launch`: TrainingArguments(bf16=True) refuses a CPU without this variable.
    env = {**os.environ, "ACCELERATE_MIXED_PRECISION": precision}
    printed = subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    reported = json.loads(printed.splitlines()[-1])
    return {
        "rate": reported["train_samples_per_second"],
        "accuracy": reported["accuracy"],
        "wall_s": time.monotonic() - began,
    }
