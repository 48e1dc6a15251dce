"""Trainings with a teacher, whatever its outputs are: their jobs, and the two promises that all of them keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.arrow import write_arrow
from tests.training.forks import assert_resumes, assert_same_losses, curve, finish
from training.jobs.protocol import Job

WriteJob = Callable[..., Path]
"""Writes the job of a training into a folder. Named: `processes`, `division` of micro-batches, `teacher` (its section;
None: no teacher), and fields of the section `training`."""


def with_teacher(job_dir: Path, outputs: Path) -> Path:
    """The job with the outputs of a teacher among its inputs."""
    job = Job.read(job_dir)
    job.model_copy(update={"inputs": {**job.inputs, "teacher": str(outputs)}}).write(job_dir)
    return job_dir


def write_outputs(folder: Path, sizes: list[int]) -> Path:
    """Outputs that are drawn, of each row so many."""
    draw = np.random.default_rng(5)
    rows = [draw.normal(size=size).astype(np.float32) for size in sizes]
    write_arrow(folder / "train.arrow", pa.table({"teacher": pa.array(rows, pa.list_(pa.float32()))}))
    return folder


def without_dropout(file: Path) -> None:
    """Turns dropout off in the config of a model."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | still))


def losses(job_dir: Path) -> list[float]:
    return [point["train_loss"] for point in curve(job_dir).values() if "train_loss" in point]


def assert_same_losses_everywhere(
    write: WriteJob, teacher: Mapping[str, Any], folder: Path, *, evaluates_alike: bool = True
) -> None:
    """Two processes, divided batches and the other engine have the losses of one process; a teacher without weight has
    those of no teacher. By default the jobs have 3 micro-batches a step. They have no dropout. `evaluates_alike`:
    divided batches have the same losses in evaluations, too."""

    def run(name: str, **given: Any) -> Path:
        job_dir = write(folder / name, **{"teacher": teacher, **given})
        outcome = finish(job_dir)
        assert outcome.state == "finished", outcome
        return job_dir

    of_two = {"gradient_accumulation_steps": 6}
    one = run("one", **of_two)
    assert losses(run("two", processes=2)) == pytest.approx(losses(one), abs=1e-5)
    divided = run("divided", division=2, **of_two)
    assert losses(divided) == pytest.approx(losses(one), rel=1e-4)
    if evaluates_alike:
        assert_same_losses(divided, one)
    assert losses(run("loop", engine="accelerate", **of_two)) == pytest.approx(losses(one), abs=1e-5)
    weightless = losses(run("weightless", **of_two, teacher={**teacher, "weight": 0.0}))
    assert weightless != pytest.approx(losses(one), abs=1e-2)
    assert weightless == pytest.approx(losses(run("alone", **of_two, teacher=None)), abs=1e-5)


def assert_killed_ends_with_the_same_bytes(write: WriteJob, teacher: Mapping[str, Any], folder: Path) -> None:
    """A training that is killed after its second checkpoint ends with the weights of an undisturbed one."""
    jobs = [write(folder / name, teacher=teacher, checkpoint_interval_s=0.05) for name in ("undisturbed", "killed")]
    assert finish(jobs[0]).state == "finished"
    assert_resumes(jobs[1], jobs[0], after=2)
