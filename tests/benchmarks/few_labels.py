"""A few rows of each label: contrastive training (options.contrastive) against ordinary training on the same rows.

Both train by the programs of the stages load_data, tokenize, fit and predict. Each draw has other rows and another
seed; the test rows, which are the same for all, share no text with them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tasks.jobs.commands import accelerate_environment
from tasks.jobs.hardware import mixed_precision
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from training.jobs.protocol import CHECKPOINTS
from training.models.repository_files import name_of
from training.recipe import Compute, Data, Training

SETS = ("sst2_sentence", "ag_news_10k")
EPOCHS = {8: 20, 16: 15, 64: 6}
"""By the rows of each label."""
DRAWS, TEST_ROWS, MAX_TOKENS = range(1, 6), 500, 32
TRAINING: dict[str, Any] = {
    **{"learning_rate": 1e-4, "warmup_steps": 0.1, "weight_decay": 0.01},
    **{"eval_strategy": "no", "load_best_model_at_end": False},
}
WAYS: dict[str, tuple[dict[str, Any], dict[int, int]]] = {
    "ordinary": ({}, {8: 8, 16: 8, 64: 16}),
    "contrastive": ({"contrastive": True}, {8: 32, 16: 32, 64: 32}),
}
"""The options of the task type, and the rows of a step by the rows of each label."""
COLUMNS: dict[str, Any] = {"text": ["text"], "label": "label"}


def measure(subject: Subject) -> list[Row]:
    """The accuracies on the test rows; nothing without sets of rows and a pretrained model."""
    if subject.sets is None or subject.own_model is None:
        return []
    figures, model = [], as_stored(subject.own_model, subject.folder / "few labels")
    for name in SETS:
        for rows in EPOCHS:
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for draw in DRAWS:
                world = prepare(subject.sets / name, rows, draw, model, subject.folder)
                for way in WAYS:
                    found[way].append(accuracy(world, model, way, rows, draw))
                    print(name, rows, draw, way, found[way][-1], file=sys.stderr, flush=True)
            gains = [new - old for new, old in zip(found["contrastive"], found["ordinary"], strict=True)]
            title = f"few labels: {name}, {rows} rows of each label"
            for what, values in (*found.items(), ("gain", gains)):
                low, high = interval(values)
                note = f"mean of {len(values)} draws, standard deviation {stdev(values):.3f}, {low:+.3f} to {high:+.3f}"
                figures.append(Row(f"{title}: {what}", mean(values), note))
    return figures


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean, by Student's t."""
    from scipy.stats import t

    width = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return mean(values) - width, mean(values) + width


def as_stored(model: Path, folder: Path) -> Path:
    """The files of the model as the stage load_model stores them, in one folder."""
    folder.mkdir()
    for file in filter(Path.is_file, model.rglob("*")):
        shutil.copyfile(file, folder / name_of(str(file.relative_to(model))))
    return folder


def prepare(rows: Path, count: int, draw: int, model: Path, folder: Path) -> Path:
    """A folder with data/ and tokens/: `count` rows of each label, validation rows, which are not used, and the test
    rows."""
    from training.data.load_rows import load
    from training.task_types.sequence_classification import SequenceClassification
    from training.tokenization.token_files import tokenize

    place = folder / f"{rows.name}-{count}-{draw}"
    if (place / "tokens").exists():
        return place
    place.mkdir()
    train, validation, test = (pq.read_table(rows / f"{split}.parquet") for split in ("train", "validation", "test"))
    others = {*validation["text"].to_pylist(), *test["text"].to_pylist()}
    texts, labels = train["text"].to_pylist(), np.array([str(label) for label in train["label"].to_pylist()])
    free = np.array([text not in others for text in texts])
    draws = np.random.default_rng(draw)
    drawn = [draws.permutation(np.flatnonzero(free & (labels == label)))[:count] for label in sorted({*labels})]
    splits = {"train": train.take(np.concatenate(drawn)), "validation": _some(validation, 60), "test": _some(test)}
    for split, table in splits.items():
        pq.write_table(table, place / f"{split}.parquet")
    data = Data(source="parquet", path=str(place), **COLUMNS)
    load(data, SequenceClassification(), {split: [str(place / f"{split}.parquet")] for split in splits}, place / "data")
    tokenize(SequenceClassification(), place / "data", model, place / "tokens", MAX_TOKENS)
    return place


def _some(table: Any, count: int = TEST_ROWS) -> Any:
    return table.take(np.sort(np.random.default_rng(1).permutation(len(table))[:count]))


def accuracy(world: Path, model: Path, way: str, rows: int, seed: int, **changes: Any) -> float:
    """The accuracy on the test rows of a model that is trained in this way on the train rows of `prepare`; `changes`
    replace fields of training."""
    options, batches = WAYS[way]
    own = {"num_train_epochs": EPOCHS[rows], "per_device_train_batch_size": batches[rows], "seed": seed}
    training = Training(**{**TRAINING, **own, **changes})
    child = multiprocessing.get_context("fork").Process(target=_train, args=(world, model, way, options, training))
    child.start()
    child.join()
    if child.exitcode != 0:
        raise RuntimeError(f"{way} on {world.name} failed")
    answers = pq.read_table(world / way / "predict/output/test.parquet", columns=["label", "prediction"])
    return float(np.mean(answers["label"].to_numpy() == answers["prediction"].to_numpy()))


def _train(world: Path, model: Path, way: str, options: dict[str, Any], training: Training) -> None:
    from tests.training import programs_here
    from training.programs import fit, predict

    os.environ |= accelerate_environment(num_processes=1, use_cpu=True, strategy="ddp")
    common = {"task": "sequence-classification", "options": options}
    (world / way / "fit" / CHECKPOINTS).mkdir(parents=True)
    programs_here.run(
        fit,
        world / way / "fit",
        {"model": model, "tokenizer": model, "tokens": world / "tokens"},
        **common,
        labels=json.loads((world / "data/labels.json").read_text()),
        max_length=MAX_TOKENS,
        training=training.model_dump(mode="json"),
        compute={**Compute().weight_settings(), "num_processes": 1, "mixed_precision": mixed_precision()},
        metrics=["accuracy"],
    )
    given = {"model": world / way / "fit/output/model", "tokens": world / "tokens"}
    changed = {"batch_size": 64, "splits": ["test"], "mixed_precision": mixed_precision()}
    programs_here.run(predict, world / way / "predict", given, **common, **{**programs_here.PREDICT, **changed})
