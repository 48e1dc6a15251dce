"""Training embeddings with a teacher's vectors: any number of processes, and the same bytes after a kill."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.arrow import read_arrow
from tests.task_types import build_world, paired, recipe_of, write_fit_job, write_rows
from tests.training import programs_here
from tests.training.engine.test_teacher import losses, with_teacher, without_dropout, write_outputs
from tests.training.forks import assert_resumes, finish
from tests.training.tiny import export_untrained
from training.programs import teacher_outputs

TASK = "embedding"
STEPS = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "logging_steps": 1}
TEACHER = {"source": "folder", "path": "big", "weight": 0.7}


def with_negatives(draw: random.Random) -> dict[str, Any]:
    """A pair with one or two texts that do not belong to it."""
    return {**paired(draw), "negatives": [paired(draw)["positive"] for _ in range(draw.randint(1, 2))]}


def recipe(world: Path, loss: str, processes: int = 1, **training: Any) -> dict[str, Any]:
    values = recipe_of(TASK, world / "rows", **{**STEPS, **training})
    values["data"]["columns"] = {"negatives": "negatives"}
    return values | {"options": {"loss": loss}, "compute": {"num_processes": processes, "mixed_precision": "no"}}


@pytest.fixture(scope="module", params=["multiple_negatives_ranking", "triplet"])
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A loss, of the whole step or of each row, and its world, with the vectors of a teacher in `outputs`."""
    loss, world = request.param, tmp_path_factory.mktemp("taught")
    write_rows(TASK, world / "rows", with_negatives)
    build_world(recipe(world, loss), world)
    without_dropout(world / "base/output/model/config.json")
    teacher = export_untrained(world / "base/output", world / "teacher", TASK, [])
    inputs = {"model": teacher, "tokenizer": teacher, "data": world / "data"}
    settings: dict[str, Any] = {"task": TASK, "options": {}, "teacher": "big", "max_length": 32, "batch_size": 8}
    programs_here.run(teacher_outputs, world / "outputs", inputs, **settings, mixed_precision="no")
    return loss, world


def run(taught: tuple[str, Path], job_dir: Path, processes: int = 1, division: int = 1, **training: Any) -> Path:
    """A finished training with the teacher."""
    loss, world = taught
    values = recipe(world, loss, processes, **{"teacher": TEACHER, **training})
    made = write_fit_job(values, world, job_dir, micro_batch_divisor=division)
    outcome = finish(with_teacher(made, world / "outputs/output"))
    assert outcome.state == "finished", outcome
    return job_dir


def test_processes_and_engines_and_divided_batches_have_the_same_losses(
    taught: tuple[str, Path], tmp_path: Path
) -> None:
    one = run(taught, tmp_path / "one", gradient_accumulation_steps=6)
    assert losses(run(taught, tmp_path / "two", processes=2)) == pytest.approx(losses(one), abs=1e-5)
    divided = run(taught, tmp_path / "divided", division=2, gradient_accumulation_steps=6)
    assert losses(divided) == pytest.approx(losses(one), rel=1e-4)
    loop = run(taught, tmp_path / "loop", gradient_accumulation_steps=6, engine="accelerate")
    assert losses(loop) == pytest.approx(losses(one), abs=1e-5)
    untaught = run(taught, tmp_path / "untaught", gradient_accumulation_steps=6, teacher={**TEACHER, "weight": 0.0})
    assert losses(untaught) != pytest.approx(losses(one), abs=1e-2)
    loss, world = taught
    plain = write_fit_job(recipe(world, loss, gradient_accumulation_steps=6), world, tmp_path / "plain")
    assert finish(plain).state == "finished"
    assert losses(untaught) == pytest.approx(losses(plain), abs=1e-5)


def test_a_killed_training_with_vectors_ends_with_the_same_bytes(taught: tuple[str, Path], tmp_path: Path) -> None:
    loss, world = taught
    jobs = []
    for name in ("undisturbed", "killed"):
        values = recipe(world, loss, teacher=TEACHER, checkpoint_interval_s=0.05)
        jobs.append(with_teacher(write_fit_job(values, world, tmp_path / name), world / "outputs/output"))
    assert finish(jobs[0]).state == "finished"
    assert_resumes(jobs[1], jobs[0], after=2)


def test_vectors_of_another_width_are_refused_with_the_way_out(taught: tuple[str, Path], tmp_path: Path) -> None:
    loss, world = taught
    texts = [2 + len(row["negatives"]) for row in read_arrow(world / "data/train.arrow").to_pylist()]
    given = write_outputs(tmp_path / "wide", [48 * count for count in texts])
    job = with_teacher(write_fit_job(recipe(world, loss, teacher=TEACHER), world, tmp_path / "job"), given)
    failure = finish(job).failure
    assert failure is not None
    (problem,) = failure.problems
    assert problem.where == "training.teacher.path"
    assert "have 48 dimensions, and the model's embeddings 32: name a teacher with 32" in problem.message
