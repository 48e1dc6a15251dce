"""Training with a teacher's likeliest tokens: any number of processes and batches, and the same bytes after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.task_types import TINY, make_world, recipe_of, write_fit_job
from tests.training import programs_here
from tests.training.engine.test_teacher import losses, with_teacher
from tests.training.forks import assert_resumes, assert_same_losses, finish
from tests.training.tiny import export_untrained
from training.programs import teacher_tokens

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


def run(taught: tuple[str, Path], job_dir: Path, processes: int = 1, division: int = 1, **training: Any) -> Path:
    """A finished training with the teacher."""
    task, world = taught
    values = recipe(task, world, processes, **{"teacher": TEACHER, **training})
    made = write_fit_job(values, world, job_dir, micro_batch_divisor=division)
    assert finish(with_teacher(made, world / "outputs/output/train")).state == "finished"
    return job_dir


def test_processes_and_engines_and_divided_batches_have_the_same_losses(
    taught: tuple[str, Path], tmp_path: Path
) -> None:
    one = run(taught, tmp_path / "one", gradient_accumulation_steps=6)
    assert losses(run(taught, tmp_path / "two", processes=2)) == pytest.approx(losses(one), abs=1e-5)
    assert_same_losses(run(taught, tmp_path / "divided", division=2, gradient_accumulation_steps=6), one)
    loop = run(taught, tmp_path / "loop", gradient_accumulation_steps=6, engine="accelerate")
    assert losses(loop) == pytest.approx(losses(one), abs=1e-5)
    untaught = run(taught, tmp_path / "untaught", gradient_accumulation_steps=6, teacher={**TEACHER, "weight": 0.0})
    assert losses(untaught) != pytest.approx(losses(one), abs=1e-2)
    task, world = taught
    plain = write_fit_job(recipe(task, world, gradient_accumulation_steps=6), world, tmp_path / "plain")
    assert finish(plain).state == "finished"
    assert losses(untaught) == pytest.approx(losses(plain), abs=1e-5)


def test_a_killed_training_with_a_teacher_ends_with_the_same_bytes(taught: tuple[str, Path], tmp_path: Path) -> None:
    task, world = taught
    jobs = []
    for name in ("undisturbed", "killed"):
        values = recipe(task, world, teacher=TEACHER, checkpoint_interval_s=0.05)
        job = write_fit_job(values, world, tmp_path / name)
        jobs.append(with_teacher(job, world / "outputs/output/train"))
    assert finish(jobs[0]).state == "finished"
    assert_resumes(jobs[1], jobs[0], after=2)
