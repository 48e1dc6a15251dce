"""Training with a teacher's likeliest tokens: any number of processes and batches, and the same bytes after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.task_types import TINY, make_world, recipe_of, write_fit_job
from tests.training import programs_here
from tests.training.taught import (
    WriteJob,
    assert_killed_ends_with_the_same_bytes,
    assert_same_losses_everywhere,
    with_teacher,
)
from tests.training.tiny import export_untrained
from training.programs import teacher_tokens

pytestmark = pytest.mark.slow

STEPS = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "logging_steps": 1}
TEACHER = {"source": "folder", "path": "big", "loss": "jsd", "beta": 0.4, "weight": 0.7, "top_k": 5}
WITHOUT_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"), 0.0)


def recipe(task: str, world: Path, processes: int = 1, **training: Any) -> dict[str, Any]:
    values = recipe_of(task, world / "rows", **{**STEPS, **training})
    return values | {"compute": {"num_processes": processes, "mixed_precision": "no"}}


@pytest.fixture(scope="module", params=["causal-lm", "sft", "seq2seq"])
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A task type and its world, with the tokens of a teacher in the folder `outputs`."""
    task, world = request.param, tmp_path_factory.mktemp("taught") / "world"
    make_world(task, world)
    file = world / "base/output/model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | WITHOUT_DROPOUT))  # each rank would draw its own
    teacher = export_untrained(world / "base/output", world / "teacher", task, [])
    inputs = {"model": teacher, "tokenizer": teacher, "student": teacher, "tokens": world / "tokens"}
    settings: dict[str, Any] = {"task": task, "options": TINY[task].options, "batch_size": 8, "mixed_precision": "no"}
    settings |= {"teacher": "big", "max_length": 32, "temperature": 1.0, "top_k": TEACHER["top_k"]}
    programs_here.run(teacher_tokens, world / "outputs", inputs, **settings)
    return task, world


@pytest.fixture
def write(taught: tuple[str, Path]) -> WriteJob:
    task, world = taught

    def write(
        job_dir: Path, processes: int = 1, division: int = 1, teacher: dict[str, Any] | None = None, **training: Any
    ) -> Path:
        values = recipe(task, world, processes, **({"teacher": teacher} if teacher else {}), **training)
        job_dir = write_fit_job(values, world, job_dir, micro_batch_divisor=division)
        return with_teacher(job_dir, world / "outputs/output/train") if teacher else job_dir

    return write


def test_processes_and_engines_and_divided_batches_have_the_same_losses(write: WriteJob, tmp_path: Path) -> None:
    assert_same_losses_everywhere(write, TEACHER, tmp_path)


def test_a_killed_training_with_a_teacher_ends_with_the_same_bytes(write: WriteJob, tmp_path: Path) -> None:
    assert_killed_ends_with_the_same_bytes(write, TEACHER, tmp_path)
