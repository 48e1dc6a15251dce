"""Exports beside their model on the CPU: rows a second and the loss, of a classifier of sentences and of a tagger.

Both are trained on some of the subject's rows: the classifier by their label, the tagger to find long words.
"""

from __future__ import annotations

import json
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
from training.tokenization.token_files import tokenize

STEPS = 120  # of 32 rows
LONG = 8  # letters of a word that the tagger finds
EXPORTS = ["onnx", "onnx-int8"]
LEAST = {"onnx-int8": 1.5}
MARGIN = 0.01
SETS = {"sequence-classification": ("sentences", "accuracy"), "token-classification": ("tags", "f1")}


def measure(subject: Subject) -> list[Row]:
    """The speeds of both exports as shares of torch's, their sizes and what they lose."""
    return [row for task in SETS for row in _measure(subject, task)]


def _measure(subject: Subject, task: str) -> list[Row]:
    name, metric = SETS[task]
    data, tokens = _prepare(subject, task)
    labels = json.loads((data / "labels.json").read_text())
    jobs = {part: subject.folder / "jobs" / f"{name}-{part}" for part in ("fit", "predict", "export")}
    settings: dict[str, Any] = {"task": task, "options": {}}
    native = mixed_precision()
    fit = {
        "labels": labels,
        "max_length": MAX_TOKENS,
        "training": Training(
            max_steps=STEPS, per_device_train_batch_size=32, eval_strategy="no", load_best_model_at_end=False
        ).model_dump(mode="json"),
        "compute": {**Compute().weight_settings(), "num_processes": 1, "mixed_precision": native},
        "metrics": [metric],
    }
    write_job(jobs["fit"], "training.programs.fit", settings | fit, {**subject.base, "tokens": tokens})
    run(jobs["fit"], training_argv())
    model = jobs["fit"] / OUTPUT / "model"
    predict = {"splits": ["validation"], "batch_size": 32, "mixed_precision": "no"}
    _run(jobs["predict"], "training.programs.predict", settings | predict, {"model": model, "tokens": tokens})
    auto_class = task_types.class_of(task).auto_class
    _run(
        jobs["export"],
        "training.programs.export_onnx",
        {"auto_class": auto_class, "exports": EXPORTS},
        {"model": model},
    )
    compare = {
        "split": "validation",
        "labels": labels,
        "metrics": [metric],
        "figure": metric,
        "less_is_better": [],
        "margin": -MARGIN,
        "confidence": 0.95,
        "champion": "the model",
        "exports": EXPORTS,
        "batch_size": 32,
    }
    inputs = {
        "model": model,
        "exports": jobs["export"] / OUTPUT,
        "data": data,
        "tokens": tokens,
        "predictions": jobs["predict"] / OUTPUT,
    }
    found = {}
    for precision in dict.fromkeys(("no", native)):
        job = subject.folder / "jobs" / f"{name}-compare-{precision}"
        precise = settings | compare | {"mixed_precision": precision}
        found[precision] = _run(job, "training.programs.compare_exports", precise, inputs)
    weights = (model / "model.safetensors").stat().st_size
    return [
        row for export in EXPORTS for row in _rows(name, export, {p: one[export] for p, one in found.items()}, weights)
    ]


def _rows(name: str, export: str, found: dict[str, Any], weights: int) -> list[Row]:
    rows = [
        Row(
            f"{name}: {export} / torch in {'fp32' if precision == 'no' else precision}",
            one["rows_per_second"] / one["torch_rows_per_second"],
            f"the same 256 rows in batches of 32, three times in turn, medians; {one['rows_per_second']:,.0f} and "
            f"{one['torch_rows_per_second']:,.0f} rows/s; {one['bytes'] / 1e6:.0f} MB of {weights / 1e6:.0f}",
            least=LEAST.get(export),
        )
        for precision, one in found.items()
    ]
    comparison = found["no"]["comparison"]
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
        rows = [
            {"text": words, "label": ["B-LONG" if len(word) >= LONG else "O" for word in words]}
            for words in map(str.split, texts)
            if words
        ]
        (files / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ignored = dict.fromkeys(("duplicates", "conflicting_labels", "shared_rows"), "ignore")
    columns = Data(source="json", path=str(files), text=["text"], label="label", checks=ignored)  # type: ignore[arg-type]
    task_type = task_types.load(task)
    load(columns, task_type, {split: [str(files / f"{split}.jsonl")] for split in ROWS}, data)
    tokenize(task_type, data, subject.base["tokenizer"], tokens, MAX_TOKENS)
    return data, tokens


def _run(job: Path, program: str, settings: dict[str, Any], inputs: dict[str, Path]) -> dict[str, Any]:
    write_job(job, program, settings, inputs)
    return run(job, python_argv(program))
