"""Training embeddings with a teacher's vectors: any number of processes, and the same bytes after a kill."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.arrow import read_arrow
from tests.task_types import build_world, paired, recipe_of, write_fit_job, write_rows
from tests.training import programs_here
from tests.training.forks import finish
from tests.training.taught import (
    WriteJob,
    assert_killed_ends_with_the_same_bytes,
    assert_same_losses_everywhere,
    with_teacher,
    without_dropout,
    write_outputs,
)
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


@pytest.fixture
def write(taught: tuple[str, Path]) -> WriteJob:
    loss, world = taught

    def write(
        job_dir: Path, processes: int = 1, division: int = 1, teacher: dict[str, Any] | None = None, **training: Any
    ) -> Path:
        values = recipe(world, loss, processes, **({"teacher": teacher} if teacher else {}), **training)
        job_dir = write_fit_job(values, world, job_dir, micro_batch_divisor=division)
        return with_teacher(job_dir, world / "outputs/output") if teacher else job_dir

    return write


@pytest.mark.slow
def test_processes_and_engines_and_divided_batches_have_the_same_losses(write: WriteJob, tmp_path: Path) -> None:
    assert_same_losses_everywhere(write, TEACHER, tmp_path, evaluates_alike=False)


@pytest.mark.slow
def test_a_killed_training_with_vectors_ends_with_the_same_bytes(write: WriteJob, tmp_path: Path) -> None:
    assert_killed_ends_with_the_same_bytes(write, TEACHER, tmp_path)


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
