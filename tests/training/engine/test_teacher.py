"""Training with a teacher: every row with its own outputs, on any number of processes, to the same bytes after a
kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.arrow import read_arrow, write_arrow
from tests.task_types import make_world as world_of_task
from tests.task_types import recipe_of, write_fit_job
from tests.training import tiny
from tests.training.forks import assert_resumes, curve, finish, weights
from tests.training.taught import (
    WriteJob,
    assert_killed_ends_with_the_same_bytes,
    assert_same_losses_everywhere,
    losses,
    with_teacher,
    without_dropout,
    write_outputs,
)
from training.data import folds
from training.jobs.protocol import Job
from training.models.loading import load_trained
from training.task_types import load

pytestmark = pytest.mark.slow

TEACHER = {"teacher": {"source": "folder", "path": "big", "temperature": 2.0, "weight": 0.7}}
STEPS = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "logging_steps": 1}


@pytest.fixture(scope="module")
def outputs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = len(read_arrow(world / "tokens/train.arrow"))
    return write_outputs(tmp_path_factory.mktemp("outputs"), [len(tiny.LABELS)] * rows)


@pytest.fixture(scope="module")
def quiet(world: Path) -> str:
    """A base model without dropout, which each rank would draw for itself."""
    base = world / "base-without-dropout"
    shutil.copytree(world / "base", base, dirs_exist_ok=True)
    without_dropout(base / "model/config.json")
    return base.name


@pytest.fixture
def write(world: Path, quiet: str, outputs: Path) -> WriteJob:
    def write(job_dir: Path, teacher: dict[str, Any] | None = None, **given: Any) -> Path:
        taught = {"teacher": teacher} if teacher else {}
        job_dir = tiny.fit_job(world, job_dir, base=quiet, **{**STEPS, **taught, **given})
        return with_teacher(job_dir, outputs) if teacher else job_dir

    return write


def test_a_killed_training_with_a_teacher_ends_with_the_same_bytes(world: Path, outputs: Path, tmp_path: Path) -> None:
    def with_dropout(job_dir: Path, **given: Any) -> Path:
        return with_teacher(tiny.fit_job(world, job_dir, **STEPS, **given), outputs)

    assert_killed_ends_with_the_same_bytes(with_dropout, TEACHER["teacher"], tmp_path)


def test_processes_and_engines_and_divided_batches_have_the_same_losses(write: WriteJob, tmp_path: Path) -> None:
    assert_same_losses_everywhere(write, TEACHER["teacher"], tmp_path)


def test_the_rows_of_a_fold_keep_their_own_outputs(world: Path, outputs: Path, tmp_path: Path) -> None:
    tokens, teacher = read_arrow(world / "tokens/train.arrow"), read_arrow(outputs / "train.arrow")
    of_row = np.random.default_rng(0).integers(1, 4, len(tokens))
    (tmp_path / "folds").mkdir()
    folds.write(of_row.astype(np.int32), tmp_path / "folds/folds.arrow")
    rest = pa.array(of_row != 2)
    write_arrow(world / "rest/train.arrow", tokens.filter(rest))
    shutil.copy(world / "tokens/validation.arrow", world / "rest")
    write_arrow(tmp_path / "rest/train.arrow", teacher.filter(rest))

    steps = {**STEPS, "num_train_epochs": 1}
    alone = with_teacher(tiny.fit_job(world, tmp_path / "alone", tokens="rest", **steps, **TEACHER), tmp_path / "rest")
    fold = with_teacher(tiny.fit_job(world, tmp_path / "fold", settings={"fold": 2}, **steps, **TEACHER), outputs)
    job = Job.read(fold)
    job.model_copy(update={"inputs": {**job.inputs, "folds": str(tmp_path / "folds")}}).write(fold)
    assert finish(alone).state == finish(fold).state == "finished"
    assert weights(fold) == weights(alone)


@pytest.mark.parametrize("task", ["multi-label-classification", "regression", "token-classification"])
def test_every_task_type_with_a_teacher_learns_from_it(task: str, tmp_path: Path) -> None:
    world = world_of_task(task, tmp_path / "world")
    labels = json.loads((world / "data/labels.json").read_text())
    rows = read_arrow(world / "data/train.arrow")
    words = [len(text) for text in rows["text"].to_pylist()] if task == "token-classification" else [1] * len(rows)
    given = write_outputs(tmp_path / "outputs", [count * max(1, len(labels)) for count in words])
    found = []
    for name, more in (("with", TEACHER), ("without", {})):
        values = recipe_of(task, world / "rows", num_train_epochs=1, logging_steps=1, **more)
        values |= {"compute": {"num_processes": 1, "mixed_precision": "no"}}
        job_dir = write_fit_job(values, world, tmp_path / name)
        assert finish(with_teacher(job_dir, given) if more else job_dir).state == "finished"
        found.append(losses(job_dir))
    assert len(found[0]) == len(found[1]) and found[0] != pytest.approx(found[1], abs=1e-3)


def with_unlabelled(job_dir: Path, world: Path, rows: int, folder: Path, logits: list[float] | None = None) -> Path:
    """The job with so many training rows more, without their labels; their outputs are drawn, or all are `logits`."""
    tokens = read_arrow(world / "tokens/train.arrow").slice(0, rows).combine_chunks()
    write_arrow(folder / "unlabelled/train.arrow", tokens.drop_columns("label"))
    job = Job.read(job_dir)
    outputs = shutil.copytree(job.inputs["teacher"], folder / "teacher")
    draw = np.random.default_rng(6)
    size = len(read_arrow(outputs / "train.arrow")["teacher"][0])
    given = [logits or draw.normal(size=size).astype(np.float32) for _ in range(rows)]
    write_arrow(outputs / "unlabelled.arrow", pa.table({"teacher": pa.array(given, pa.list_(pa.float32()))}))
    more = {"teacher": str(outputs), "unlabelled": str(folder / "unlabelled")}
    job.model_copy(update={"inputs": {**job.inputs, **more}}).write(job_dir)
    return job_dir


def test_a_killed_training_on_rows_without_labels_ends_with_the_same_bytes(
    world: Path, outputs: Path, tmp_path: Path
) -> None:
    jobs = []
    for name in ("undisturbed", "killed"):
        job = tiny.fit_job(
            world, tmp_path / name, **STEPS, **TEACHER, class_weights="balanced", checkpoint_interval_s=0.05
        )
        jobs.append(with_unlabelled(with_teacher(job, outputs), world, 30, tmp_path / f"of-{name}"))
    assert finish(jobs[0]).state == "finished"
    assert max(curve(jobs[0])) == 2 * 15, "180 rows in steps of 12"
    assert_resumes(jobs[1], jobs[0], after=2)


def test_rows_that_the_teacher_is_unsure_of_are_left_out(world: Path, outputs: Path, tmp_path: Path) -> None:
    """So the training is that without them."""
    least = {"teacher": {**TEACHER["teacher"], "unlabelled_min_confidence": 0.9}}
    steps = {**STEPS, "num_train_epochs": 1}
    job = tiny.fit_job(world, tmp_path / "unsure", **steps, **least)
    unsure = with_unlabelled(with_teacher(job, outputs), world, 30, tmp_path / "more", [1.0, 0.9, 0.8])
    alone = with_teacher(tiny.fit_job(world, tmp_path / "alone", **steps, **TEACHER), outputs)
    assert finish(unsure).state == finish(alone).state == "finished"
    assert weights(unsure) == weights(alone)


@pytest.mark.parametrize(("threshold", "used"), [(0.6, True), (0.8, False)])
def test_thresholds_of_the_teacher_choose_rows_by_calibrated_probabilities(
    threshold: float, used: bool, world: Path, outputs: Path, tmp_path: Path
) -> None:
    """The probability of each row is 0.91, and 0.69 after calibration."""
    labels = json.loads((world / "data/labels.json").read_text())
    calibration = {"function": "softmax", "labels": labels[::-1], "scale": [0.5], "offset": [0.0]}
    calibration |= {"abstain": {"max_error": 0.1, "confidence": 0.9, "thresholds": {}, "others": threshold}}
    teacher = {"teacher": {**TEACHER["teacher"], "unlabelled_min_confidence": "abstain"}}
    steps = {**STEPS, "num_train_epochs": 1}
    job = tiny.fit_job(world, tmp_path / "job", settings={"calibration": calibration}, **steps, **teacher)
    chosen = with_unlabelled(with_teacher(job, outputs), world, 30, tmp_path / "more", [3.0, 0.0, 0.0])
    alone = with_teacher(tiny.fit_job(world, tmp_path / "alone", **steps, **TEACHER), outputs)
    assert finish(chosen).state == finish(alone).state == "finished"
    assert (weights(chosen) != weights(alone)) == used


@pytest.mark.parametrize("task", ["multi-label-classification", "regression", "token-classification"])
def test_every_task_type_with_a_teacher_learns_from_rows_without_labels(task: str, tmp_path: Path) -> None:
    world = world_of_task(task, tmp_path / "world")
    labels = json.loads((world / "data/labels.json").read_text())
    rows = read_arrow(world / "data/train.arrow")
    words = [len(text) for text in rows["text"].to_pylist()] if task == "token-classification" else [1] * len(rows)
    given = write_outputs(tmp_path / "outputs", [count * max(1, len(labels)) for count in words])
    without_dropout(world / "base/output/model/config.json")
    steps = {"num_train_epochs": 1, "logging_steps": 1, "per_device_train_batch_size": 1, "learning_rate": 1e-12}
    values = recipe_of(task, world / "rows", **steps, **TEACHER)
    values |= {"compute": {"num_processes": 1, "mixed_precision": "no"}}
    job_dir = with_teacher(write_fit_job(values, world, tmp_path / "job"), given)
    with_unlabelled(job_dir, world, 20, tmp_path / "more")
    write_outputs(tmp_path / "some", [count * max(1, len(labels)) for count in words[:20]])
    shutil.copy(tmp_path / "some/train.arrow", tmp_path / "more/teacher/unlabelled.arrow")
    assert finish(job_dir).state == "finished"
    expected = losses_by_hand(task, job_dir, world, [given / "train.arrow", tmp_path / "some/train.arrow"])
    assert len(expected) == 170 and sorted(losses(job_dir)) == pytest.approx(sorted(expected), abs=1e-4)


def losses_by_hand(task: str, job_dir: Path, world: Path, outputs: list[Path]) -> list[float]:
    """The loss of each row with its label, and of the first rows without, by the exported model. All rows have the
    teacher's outputs."""
    network = load_trained(load(task), job_dir / "output/model")
    tokens, found = read_arrow(world / "tokens/train.arrow").to_pylist(), []
    for is_labelled, file in zip((True, False), outputs, strict=True):
        for row, given in zip(tokens, read_arrow(file)["teacher"].to_pylist(), strict=False):
            with torch.no_grad():
                logits = network(input_ids=torch.tensor([row["input_ids"]])).logits[0].double()
            teacher = torch.tensor(given, dtype=torch.float64)
            if task == "token-classification":
                logits, teacher = logits[row["first"]], teacher.view(len(row["first"]), -1)
                ordinary = -logits.log_softmax(1)[range(len(logits)), row["label"]].mean()
                soft = -((teacher / 2).softmax(1) * (logits / 2).log_softmax(1)).sum(1).mean() * 4
            elif task == "regression":
                ordinary, soft = ((logits - value).square().mean() for value in (row["label"], teacher))
            else:
                truth = torch.zeros_like(logits)
                truth[row["label"]] = 1.0
                ordinary = binary_cross_entropy_with_logits(logits, truth)
                soft = binary_cross_entropy_with_logits(logits / 2, (teacher / 2).sigmoid()) * 4
            found.append(float(is_labelled * 0.3 * ordinary + 0.7 * soft))
    return found
