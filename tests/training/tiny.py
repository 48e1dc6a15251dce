"""A data set, its tokens, a tokenizer and a model, so small that a step takes milliseconds; jobs on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.arrow import read_arrow
from training.engine.fit_settings import FitSettings
from training.jobs.protocol import Events, Job
from training.recipe import Compute, Training

LABELS = ["animal", "tool", "food"]
WORDS = {
    "animal": ["cat", "dog", "horse", "cow", "sheep", "goat"],
    "tool": ["hammer", "saw", "drill", "nail", "wrench", "plane"],
    "food": ["bread", "cheese", "apple", "soup", "rice", "cake"],
}
CONFIG = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 120,
    "max_position_embeddings": 64,
}


def write_data(out: Path, rows: dict[str, int]) -> Path:
    """A data folder: rows of a few words that tell the label, and some that do not."""
    out.mkdir(parents=True)
    draw = random.Random(7)
    schema = pa.schema([("text", pa.string()), ("label", pa.int64())])
    for split, count in rows.items():
        labels = [draw.randrange(len(LABELS)) for _ in range(count)]
        everything = sorted(word for words in WORDS.values() for word in words)
        texts = [
            " ".join([*draw.choices(WORDS[LABELS[label]], k=2), *draw.choices(everything, k=draw.randrange(12))])
            for label in labels
        ]
        with pa.OSFile(str(out / f"{split}.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            writer.write_table(pa.table([texts, labels], schema=schema), max_chunksize=50)
    (out / "labels.json").write_text(json.dumps(LABELS))
    return out


def write_tokens(out: Path, rows: list[list[int]], labels: list[Any], split: str = "train", block: int = 50) -> Path:
    """A tokens folder with one split, in record batches of `block` rows, whose labels are of any type."""
    out.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("length", pa.int32()), ("label", pa.array(labels).type)])
    with pa.OSFile(str(out / f"{split}.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for start in range(0, len(rows), block):
            part = rows[start : start + block]
            lengths = np.array([len(row) for row in part], dtype=np.int32)
            given = pa.array(labels[start : start + block], schema.field("label").type)
            columns = [pa.array(part, pa.list_(pa.int32())), lengths, given]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return out


def write_predictions(file: Path, labels: Any, logits: Any, tokens: Any, predictions: Any = None) -> None:
    """What training.programs.predict writes of a classification: (N,) labels, (N, L) logits and (N,) numbers of
    tokens."""
    given = logits.argmax(-1) if predictions is None else predictions
    columns = {
        "row": range(len(labels)),
        "label": labels,
        "prediction": given,
        "logits": list(logits),
        "tokens": tokens,
    }
    pq.write_table(pa.table(columns), file)


def make_world(home: Path, **config: Any) -> Path:
    """data/, tokens/, base/model/ and base/tokenizer/ under `home`; `config` changes the model's configuration."""
    from training.programs import create_model

    data = write_data(home / "data", {"train": 150, "validation": 60})
    tokenizer = create_model.train_wordpiece(
        lambda: create_model.texts(data / "train.arrow", ["text"]), CONFIG["vocab_size"]
    )
    model = create_model.create(CONFIG | config | {"vocab_size": tokenizer.get_vocab_size()}, tokenizer, seed=1)
    create_model.save_tokenizer(tokenizer, 64, home / "base/tokenizer")
    model.save_pretrained(home / "base/model")
    for split in ("train", "validation"):
        table = read_arrow(data / f"{split}.arrow")
        rows = [encoding.ids for encoding in tokenizer.encode_batch(table["text"].to_pylist())]
        write_tokens(home / "tokens", rows, table["label"].to_pylist(), split)
    return home


def export_untrained(base: Path, out: Path, task: Any = "sequence-classification", labels: Any = LABELS) -> Path:
    """The folder `out`, as training exports the model and the tokenizer in `base`, with a head that is drawn."""
    from training import task_types
    from training.models.loading import export, load_for_training, load_preprocessor

    task_type = task_types.load(task) if isinstance(task, str) else task
    read_by = load_preprocessor(task_type, base / "tokenizer")
    model = load_for_training(task_type, base / "model", labels, read_by, seed=1)
    export(model, base / "tokenizer", out)
    return out


def fit_job(
    world: Path,
    job_dir: Path,
    *,
    base: str = "base",
    tokens: str = "tokens",
    settings: dict[str, Any] | None = None,
    precision: str = "no",
    processes: int = 1,
    division: int = 1,
    compute: dict[str, Any] | None = None,
    **training: Any,
) -> Path:
    """Write a job that trains on the world; `training` and `compute` change those sections of the recipe, `settings`
    the program's other settings."""
    chosen = {
        "num_train_epochs": 3,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 8,
        "logging_steps": 4,
    }
    every = {
        "task": "sequence-classification",
        "labels": LABELS,
        "max_length": 64,
        "training": Training(**{**chosen, **training}).model_dump(),
        "compute": {
            **Compute(**compute or {}).weight_settings(),
            "num_processes": processes,
            "mixed_precision": precision,
        },
        "micro_batch_divisor": division,
        "metrics": ["accuracy", "f1", "calibration_error"],
        **(settings or {}),
    }
    inputs = {"model": f"{base}/model", "tokenizer": f"{base}/tokenizer", "tokens": tokens}
    absolute = {name: str(world / path) for name, path in inputs.items()}
    if named := training.get("resume_from_checkpoint"):
        link = job_dir / "inputs/checkpoint"  # as tasks.jobs.job gives a program its inputs
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(named)
        absolute["checkpoint"] = str(link)
    Job(program="training.programs.fit", key=job_dir.name, settings=every, inputs=absolute).write(job_dir)
    return job_dir


def task_of(job_dir: Path) -> Any:
    """The task that an engine is given for a job of training.programs.fit."""
    from training.engine.task_setup import make_task

    job = Job.read(job_dir)
    return make_task(FitSettings.model_validate(job.settings), job.inputs, job_dir, Events(job_dir / "events.jsonl"))
