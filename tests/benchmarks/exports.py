"""Exports beside their model on the CPU: speed and loss, of a classifier of sentences and of a tagger.

Both are trained on some of the subject's rows: the classifier by their label, the tagger to find long words. Speeds are
in rows a second of processor time, with one thread, so that other work on the machine hardly changes them. Run as a
program it is the process that measures: `... TASK MODEL TOKENS EXPORT…`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tasks.jobs.commands import python_argv
from tasks.jobs.hardware import mixed_precision
from tests.benchmarks.subject import MAX_TOKENS, ROWS, Subject, run, training_argv, write_job
from tests.benchmarks.table import Row
from training import task_types
from training.data.load_rows import load
from training.jobs.protocol import OUTPUT
from training.recipe import Compute, Data, Training
from training.recipe.tables.exports import EXPORTS, by_module
from training.tokenization.token_files import tokenize

STEPS = 120  # of 32 rows
ROUNDS = 3  # after one that is not timed
LONG = 8  # letters of a word that the tagger finds
ONNX = by_module(EXPORTS)["onnx_files"]
FILES = {name: EXPORTS[name].file for name in ONNX}
LEAST = {"onnx-int8": 1.5}
MARGIN = 0.01
SETS = {"sequence-classification": ("sentences", "accuracy"), "token-classification": ("tags", "f1")}


def measure(subject: Subject) -> list[Row]:
    """The speeds of both exports as multiples of torch's, their sizes and what they lose."""
    return [row for task in SETS for row in _measure(subject, task)]


def _measure(subject: Subject, task: str) -> list[Row]:
    data, tokens = _prepare(subject, task)
    jobs = subject.folder / "jobs"
    settings: dict[str, Any] = {"task": task, "options": {}}
    training = Training(
        max_steps=STEPS, per_device_train_batch_size=32, eval_strategy="no", load_best_model_at_end=False
    )
    fit = {
        "labels": json.loads((data / "labels.json").read_text()),
        "max_length": MAX_TOKENS,
        "training": training.model_dump(mode="json"),
        "compute": {**Compute().weight_settings(), "num_processes": 1, "mixed_precision": mixed_precision()},
        "metrics": [SETS[task][1]],
    }
    job = jobs / f"{SETS[task][0]}-fit"
    write_job(job, "training.programs.fit", settings | fit, {**subject.base, "tokens": tokens})
    run(job, training_argv())
    return compare(task, job / OUTPUT / "model", data, tokens, jobs)


def compare(task: str, model: Path, data: Path, tokens: Path, jobs: Path) -> list[Row]:
    """The figures of both exports of a trained model."""
    name, metric = SETS[task]
    settings: dict[str, Any] = {"task": task, "options": {}}
    predict = {"splits": ["validation"], "batch_size": 32, "mixed_precision": "no"}
    predicted = _run(jobs / f"{name}-predict", "predict", settings | predict, {"model": model, "tokens": tokens})
    export = {"auto_class": task_types.class_of(task).auto_class, "exports": ONNX}
    exported = _run(jobs / f"{name}-export", "export_model", export, {"model": model})
    compared = {
        "split": "validation",
        "metrics": [metric],
        "figure": metric,
        "less_is_better": [],
        "margin": -MARGIN,
        "confidence": 0.95,
        "champion": "the model",
        "exports": ONNX,
        "batch_size": 32,
        "mixed_precision": "no",
    }
    inputs = {"model": model, "exports": exported, "data": data, "tokens": tokens, "predictions": predicted}
    job = jobs / f"{name}-compare"
    found = json.loads((_run(job, "compare_exports", settings | compared, inputs) / "log" / "exports.json").read_text())
    files = [str(exported / file) for file in FILES.values()]
    argv = [sys.executable, "-m", "tests.benchmarks.exports", task, str(model), str(tokens), *files]
    speeds = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)
    weights = (model / "model.safetensors").stat().st_size
    return [row for export in ONNX for row in _rows(name, export, found[export], speeds, weights)]


def _rows(name: str, export: str, found: dict[str, Any], speeds: dict[str, float], weights: int) -> list[Row]:
    own = speeds[FILES[export]]
    rows = [
        Row(
            f"{name}: {export} / torch in {precision}",
            own / speeds[precision],
            f"256 rows in batches of 32, three times in turn, medians; {own:,.0f} and {speeds[precision]:,.0f} rows a "
            f"second of one processor; {found['bytes'] / 1e6:.0f} MB and {weights / 1e6:.0f} MB",
            least=LEAST.get(export),
        )
        for precision in ("fp32", "bf16")
    ]
    comparison = found["comparison"]
    how = (
        f"{comparison['metric']} {comparison['value']:.4f} and {comparison['champion_value']:.4f} of the model on the "
        f"same {comparison['rows']:,} rows; {comparison['gained']} rows better, {comparison['lost']} worse; at 95%"
    )
    return [*rows, Row(f"{name}: {export} is worse by at most", -comparison["at_least"], how, most=MARGIN)]


def _prepare(subject: Subject, task: str) -> tuple[Path, Path]:
    """The folders of the rows and of their tokens."""
    if task == "sequence-classification":
        return subject.loaded, subject.tokens
    files, data, tokens = (subject.folder / f"tags-{part}" for part in ("files", "data", "tokens"))
    files.mkdir()
    for split in ROWS:
        texts = pq.read_table(subject.data / f"{split}.parquet", columns=["text"])["text"].to_pylist()
        rows = [{"text": words, "label": [*map(_tag, words)]} for words in map(str.split, texts) if words]
        (files / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ignored = dict.fromkeys(("duplicates", "conflicting_labels", "shared_rows"), "ignore")
    columns = Data(source="json", path=str(files), text=["text"], label="label", checks=ignored)  # type: ignore[arg-type]
    task_type = task_types.load(task)
    load(columns, task_type, {split: [str(files / f"{split}.jsonl")] for split in ROWS}, data)
    tokenize(task_type, data, subject.base["tokenizer"], tokens, MAX_TOKENS)
    return data, tokens


def _tag(word: str) -> str:
    return "B-LONG" if len(word) >= LONG else "O"


def _run(job: Path, program: str, settings: dict[str, Any], inputs: dict[str, Path]) -> Path:
    """The output of a program of one process."""
    write_job(job, f"training.programs.{program}", settings, inputs)
    run(job, python_argv(f"training.programs.{program}"))
    return job / OUTPUT


def _speeds(task: str, folder: Path, tokens: Path, exports: list[Path]) -> dict[str, float]:
    """Rows a second of processor time: of torch by precision, and of each export by its file."""
    import torch

    from training.batching.batches import TokenRows
    from training.engine.inference import predict
    from training.models import loading
    from training.models.onnx_files import OnnxModel
    from training.programs.compare_exports import sample

    torch.set_num_threads(1)
    loading.make_deterministic()
    task_type, rows = task_types.load(task), sample(TokenRows(tokens / "validation.arrow"))
    collate = task_type.collator(loading.load_tokenizer(folder), 1)
    network = loading.load_trained(task_type, folder)
    models: dict[str, tuple[Any, str]] = {"fp32": (network, "no"), "bf16": (network, "bf16")}
    for name in FILES.values():
        (file,) = (file for file in exports if file.as_posix().endswith(name))
        models[name] = (OnnxModel(file, network.config, threads=1), "no")
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(1 + ROUNDS):
        for name, (model, precision) in models.items():
            began = time.process_time()
            predict(task_type, model, rows, collate, 32, precision)
            seconds[name].append(time.process_time() - began)
    return {name: len(rows) / statistics.median(took[1:]) for name, took in seconds.items()}


if __name__ == "__main__":
    print(json.dumps(_speeds(sys.argv[1], *map(Path, sys.argv[2:4]), list(map(Path, sys.argv[4:])))))
