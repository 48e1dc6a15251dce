"""The stored outputs of a teacher: their size, their speed beside that of predictions, and the speed of a training with
them.

The teacher is the subject's model after one step, and so is the student: the cost of either does not depend on what it
has learned.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tasks.jobs.commands import python_argv
from tasks.jobs.hardware import mixed_precision
from tests.benchmarks.subject import KIND, MAX_TOKENS, Subject, run, training_argv, write_job
from tests.benchmarks.table import Row
from training.jobs.protocol import OUTPUT, Job
from training.programs.teacher_outputs import ROWS_AT_ONCE

STEPS = 60
ROUNDS = 3
"""Pairs of measurements, taken in turn; the median ratio counts."""
TEACHER = {"source": "folder", "path": "big", "temperature": 2.0, "weight": 0.5}


def measure(subject: Subject) -> list[Row]:
    """Bytes a row, and both ratios."""
    once = {"max_steps": 1, "eval_strategy": "no", "load_best_model_at_end": False}
    job = subject.training_job("teacher-fit", **once)
    run(job, training_argv())
    model, forward, rates = job / OUTPUT / "model", list[float](), list[tuple[float, float]]()
    outputs = Path()
    for number in range(ROUNDS):
        outputs, stored = _compute(subject, model, f"teacher-outputs-{number}")
        predicted = _predict(subject, model, f"teacher-predict-{number}")
        forward.append(stored / predicted)
        rates.append((_train(subject, f"taught-{number}", outputs), _train(subject, f"untaught-{number}", None)))
    size, trained = (outputs / "train.arrow").stat().st_size, [taught / plain for taught, plain in rates]
    how = f"median of {ROUNDS} in turn, {subject.rows:,} rows"
    return [
        Row("storage of a teacher's outputs, a row", size / subject.rows, f"{subject.rows:,} rows", unit="bytes"),
        Row("a teacher's outputs beside predictions, rows/s", statistics.median(forward), how, least=0.9),
        Row("training with stored outputs beside one without", statistics.median(trained), how, least=0.95),
    ]


def _compute(subject: Subject, model: Path, name: str) -> tuple[Path, float]:
    """The folder of the outputs, and the rows a second."""
    settings = {"task": KIND, "options": {}, "teacher": "big", "max_length": MAX_TOKENS, "batch_size": ROWS_AT_ONCE}
    settings |= {"mixed_precision": mixed_precision()}
    job = subject.folder / "jobs" / name
    inputs = {"model": model, "tokenizer": model, "data": subject.loaded}
    write_job(job, "training.programs.teacher_outputs", settings, inputs)
    return job / OUTPUT, float(_result(job, "training.programs.teacher_outputs")["rows_per_second"])


def _predict(subject: Subject, model: Path, name: str) -> float:
    settings = {"task": KIND, "options": {}, "splits": ["train"], "batch_size": ROWS_AT_ONCE}
    settings |= {"mixed_precision": mixed_precision()}
    job = subject.folder / "jobs" / name
    write_job(job, "training.programs.predict", settings, {"model": model, "tokens": subject.tokens})
    return float(_result(job, "training.programs.predict")["rows_per_second"])


def _train(subject: Subject, name: str, outputs: Path | None) -> float:
    """The rows a second of a training, with the outputs of a teacher or without."""
    more: dict[str, Any] = {"teacher": TEACHER} if outputs else {}
    steps = {"max_steps": STEPS, "eval_strategy": "no", "load_best_model_at_end": False}
    job = subject.training_job(name, **steps, **more)
    if outputs:
        written = Job.read(job)
        written.model_copy(update={"inputs": {**written.inputs, "teacher": str(outputs)}}).write(job)
    return float(run(job, training_argv())["train_rows_per_second"])


def _result(job: Path, program: str) -> Any:
    return run(job, python_argv(program))
