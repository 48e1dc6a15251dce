"""Losses of all rows of an optimizer step: the same however the step is divided, and exact after a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import task_types as tiny_tasks
from tests.training.forks import assert_same, curve, finish, kill_when, within_a_step

pytestmark = pytest.mark.slow

TASK, LABELLED = "sentence-similarity", "sequence-classification"
# One epoch: 7 steps of 20 rows, and one of 10. SGD does not enlarge differences of small gradients, as Adam does.
ONE_EPOCH: dict[str, Any] = {"num_train_epochs": 1, "optim": "sgd", "learning_rate": 0.05, "logging_steps": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def recipe(world: Path, processes: int = 1, **training: Any) -> dict[str, Any]:
    """Of scored pairs, or of texts with labels in the world of that name."""
    values = tiny_tasks.recipe_of(LABELLED if world.name == "labels" else TASK, world / "rows", **training)
    if world.name == "labels":
        values |= {"task": "embedding", "options": {"loss": "batch_all_triplet"}}
        values["evaluation"] = {"splits": ["validation"], "metrics": ["ndcg_at_10"]}
    values["model"]["config"] = {**values["model"]["config"], **NO_DROPOUT}
    return values | {"compute": {"strategy": "ddp", "num_processes": processes, "mixed_precision": "no"}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("world")
    tiny_tasks.write_rows(TASK, home / "rows")
    return tiny_tasks.build_world(recipe(home), home)


@pytest.fixture(scope="module")
def labelled_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("world") / "labels"
    tiny_tasks.write_rows(LABELLED, home / "rows")
    return tiny_tasks.build_world(recipe(home), home)


def trained(world: Path, job_dir: Path, batch: int, accumulation: int, **settings: Any) -> Path:
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    tiny_tasks.write_fit_job(recipe(world, **ONE_EPOCH, **sizes, **settings), world, job_dir)
    outcome = finish(job_dir)
    assert outcome.state == "finished", outcome
    return job_dir


@pytest.fixture(scope="module")
def undivided(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(world, tmp_path_factory.mktemp("jobs") / "undivided", 20, 1)


@pytest.mark.parametrize("engine", ["trainer", "accelerate"])
@pytest.mark.parametrize(("batch", "accumulation", "processes"), [(5, 4, 1), (10, 1, 2), (4, 3, 2)])
def test_micro_batches_and_processes_change_neither_loss_nor_weights(
    world: Path, undivided: Path, tmp_path: Path, engine: str, batch: int, accumulation: int, processes: int
) -> None:
    if batch * accumulation * processes != 20:
        undivided = trained(world, tmp_path / "undivided", batch * accumulation * processes, 1)
    divided = trained(world, tmp_path / "divided", batch, accumulation, processes=processes, engine=engine)
    assert_same_training(world, divided, undivided)


def test_texts_with_labels_are_compared_with_all_of_the_step(labelled_world: Path, tmp_path: Path) -> None:
    undivided = trained(labelled_world, tmp_path / "undivided", 20, 1)
    assert_same_training(labelled_world, trained(labelled_world, tmp_path / "divided", 5, 4), undivided)
    shared = trained(labelled_world, tmp_path / "shared", 10, 1, processes=2)
    assert_same_training(labelled_world, shared, undivided)


def assert_same_training(world: Path, divided: Path, undivided: Path) -> None:
    ours, theirs = (load_file(job / "output/model/model.safetensors") for job in (divided, undivided))
    start = load_file(world / "base/output/model/model.safetensors")
    moved = max(float((weight - start[name]).abs().max()) for name, weight in theirs.items())
    different = max(float((weight - theirs[name]).abs().max()) for name, weight in ours.items())
    assert moved > 1e-3 and different < 1e-5
    losses = [[curve(job)[step]["train_loss"] for step in range(1, 8)] for job in (divided, undivided)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("rows", "engine"), [("scores", "trainer"), ("scores", "accelerate"), ("labels", "trainer")])
def test_killed_between_micro_batches_it_ends_with_the_same_bytes(
    rows: str, engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With dropout, which both passes of a micro-batch draw alike."""
    still = request.getfixturevalue("world" if rows == "scores" else "labelled_world")
    world = shutil.copytree(still, tmp_path / still.name)
    config = world / "base/output/model/config.json"
    drops = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    config.write_text(json.dumps(json.loads(config.read_text()) | drops))
    sizes = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 4, "num_train_epochs": 2}
    values = recipe(world, engine=engine, **sizes)
    undisturbed = tiny_tasks.write_fit_job(values, world, tmp_path / "undisturbed")
    assert finish(undisturbed).state == "finished"
    values["training"]["checkpoint_interval_s"] = 1e-9
    killed = tiny_tasks.write_fit_job(values, world, tmp_path / "killed")
    assert kill_when(killed, lambda: within_a_step(killed, 5))
    assert finish(killed).state == "finished"
    assert_same(killed, undisturbed)
