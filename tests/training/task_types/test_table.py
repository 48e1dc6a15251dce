"""A task type with predictions of its own is a file and a line of the table: it is trained, scored and asked."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.task_types import ROWS, build_world, write_fit_job
from tests.training.forks import finish, run_fit
from tests.training.tiny import CONFIG, WORDS
from training import task_types
from training.engine.predictor import Predictor
from training.jobs.protocol import Events, Job
from training.programs import predict, score
from training.recipe import parse
from training.recipe.tables.task_types import TASK_TYPES

NAME, CLASS = "ordinal-regression", "deployments.examples.ordinal_regression:OrdinalRegression"
STARS = ["1", "2", "3", "4"]


def values(rows: Path) -> dict[str, Any]:
    return {
        "name": "stars",
        "task": NAME,
        "data": {
            "source": "json",
            "path": str(rows),
            "text": ["text"],
            "label": "label",
            "checks": dict.fromkeys(("duplicates", "conflicting_labels", "shared_rows"), "ignore"),
        },
        "model": {"source": "scratch", "config": CONFIG},
        "tokens": {"max_length": 32},
        "training": {"num_train_epochs": 6, "learning_rate": 3e-3, "per_device_train_batch_size": 20},
        "compute": {"num_processes": 1, "mixed_precision": "no"},
        "evaluation": {"splits": ["validation"]},
    }


def fit(job_dir: str, rank: dict[str, str]) -> None:
    """In a fork, whose table has no such line yet."""
    TASK_TYPES[NAME] = CLASS
    run_fit(job_dir, rank)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows with as many animals as stars, less one, and the stages before training."""
    monkeypatch.setitem(TASK_TYPES, NAME, CLASS)
    draw, rows = random.Random(3), tmp_path / "rows"
    rows.mkdir()
    for split, count in ROWS.items():
        stars = [draw.randrange(len(STARS)) for _ in range(count)]
        texts = [[*draw.choices(WORDS["animal"], k=of), *draw.choices(WORDS["tool"], k=4 - of)] for of in stars]
        made = [{"text": " ".join(text), "label": STARS[of]} for text, of in zip(texts, stars, strict=True)]
        (rows / f"{split}.jsonl").write_text("\n".join(map(json.dumps, made)) + "\n")
    return build_world(values(rows), tmp_path)


def test_a_task_type_with_predictions_of_its_own_is_a_file_and_a_line_of_the_table(world: Path) -> None:
    recipe = parse(values(world / "rows"))
    assert recipe.evaluation.metrics == ["rank_error"] and task_types.code_modules(NAME) == [CLASS.partition(":")[0]]
    job_dir = write_fit_job(values(world / "rows"), world, world / "fit")
    assert finish(job_dir, program=fit).state == "finished", (job_dir / "log.txt").read_text()
    model, task = job_dir / "output/model", {"task": NAME, "options": {}}

    forward = {"splits": ["validation"], "batch_size": 16, "mixed_precision": "no"}
    inputs = {"model": str(model), "tokens": str(world / "tokens")}
    job = Job(program=predict.__name__, key="p", settings=task | forward, inputs=inputs)
    (world / "predict/output").mkdir(parents=True)
    predict.main(world / "predict", job, Events(world / "predict/events.jsonl"))

    grouped = {"slices": ["length_bucket"], "each": [], "named": {}, "fewest_rows": 10, "most_groups": 50}
    scored = task | {"splits": ["validation"], "metrics": ["rank_error", "exact"]} | grouped
    read = {"predictions": str(world / "predict/output"), "data": str(world / "data"), "tokens": "", "model": ""}
    (world / "score").mkdir()
    figures = score.main(
        world / "score",
        Job(program=score.__name__, key="s", settings=scored, inputs=read),
        Events(world / "score/events.jsonl"),
    )
    found = {name: metric["value"] for name, metric in figures["validation"].items()}
    assert found["rank_error"] < 1 and found["exact"] > 0  # guesses are 1.25 ranks off

    predictor = Predictor(task_types.load(NAME), model, model, 32)
    (answer,) = predictor.predict(pa.RecordBatch.from_pydict({"text": ["cat dog cow hammer"]}))
    assert predictor.labels == STARS and answer["label"] == STARS[int(np.sum(np.array(answer["above"]) > 0.5))]
