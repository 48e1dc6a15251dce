"""Asking a registered model, in a child program of its own; no stage."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.cache import settings
from tasks.jobs.launch import python_argv, require_finished, run_job
from tasks.registry.versions import COLUMNS_TAG, TASK_TAG, aliases_of, need_model, need_version
from tasks.tracking.connection import MAX_LENGTH_TAG, connect, environment, mlflow_errors
from training import task_types
from training.data.prediction_files import READ, WRITTEN
from training.jobs.protocol import Job, fsync
from training.problems import Problem, UserError
from training.task_types import TASK_TYPES

__all__ = ["READ", "WRITTEN", "Asked", "ask", "ask_of_file", "find", "rows_of"]

PROGRAM = "tasks.registry.predict_rows"
STALL_TIMEOUT_S = 600.0

OnEvents = Callable[[list[dict[str, Any]]], None]


@dataclass(frozen=True)
class Asked:
    """A version that is asked."""

    uri: str
    """MLflow's."""
    max_length: int
    """Tokens after which it cuts a text."""
    task: Mapping[str, Any]
    """Its task type and the task type's options, as `task_types.load` takes them."""
    columns: Mapping[str, str]
    """The columns that it was shown of the rows it was trained on, by what they are to its task type, in its order."""


def find(name: str, alias: str = "", version: str = "", own_task: str = "") -> Asked:
    """The version of this number, or with this alias; with neither, the champion.

    A registry may name any code as a task: one that is not the project's own must be `own_task`. Raises UserError where
    it is not, or the registry has no such model, alias or version, MlflowFailed where it does not answer.
    """
    with mlflow_errors():
        client = connect()
        model = need_model(client, name)
        chosen = {"version": version} if version else {"alias": alias or aliases_of(model).champion}
        found = need_version(client, model, **chosen)
    said = f"version {found.version} of {name!r}"
    if not {TASK_TAG, COLUMNS_TAG, MAX_LENGTH_TAG} <= found.tags.keys():
        message = f"{said} does not say what it is asked: run its recipe again, and it will."
        raise UserError([Problem(kind="option", where="NAME", message=message)])
    task = json.loads(found.tags[TASK_TAG])
    if task["task"] not in TASK_TYPES and task["task"] != own_task:
        message = f"{said} is of a kind of its author's: to run that code, as it is here, set --task {task['task']}."
        raise UserError([Problem(kind="option", where="--task", message=message)])
    length, columns = int(found.tags[MAX_LENGTH_TAG]), json.loads(found.tags[COLUMNS_TAG])
    return Asked(f"models:/{name}/{found.version}", length, task, columns)


def rows_of(model: Asked, given: Sequence[str]) -> list[list[str]]:
    """Splits the given values into rows: a value for each column, or for each column that is not optional.

    Raises UserError if they make no whole rows.
    """
    columns = task_types.class_of(model.task["task"]).columns
    all_of_them = list(model.columns)
    needed = [name for name in all_of_them if not (columns[name].optional and columns[name].may_be_empty)]
    for names in (all_of_them, needed):
        if names and not len(given) % len(names):
            starts = range(0, len(given), len(names))
            rows = [dict(zip(names, given[start : start + len(names)], strict=True)) for start in starts]
            return [[row.get(name, "") for name in all_of_them] for row in rows]
    message = (
        f"the model takes {len(all_of_them)} values at a time ({', '.join(model.columns.values())}), and there are "
        f'{len(given)}. Write "" where a row may have nothing.'
    )
    raise UserError([Problem(kind="option", where="TEXT", message=message)])


def ask(model: Asked, rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """What it answers to each row, a value a column, as lines for people to read.

    Raises UserError for values that its task type does not take, MlflowFailed where MLflow does not answer.
    """
    figures = _run(model, {"rows": [list(row) for row in rows]}, {}, lambda _: None)
    return list(figures["answers"])


def ask_of_file(model: Asked, file: Path, out: Path, on_events: OnEvents) -> dict[str, int]:
    """Writes the rows of the file, with answers, to `out`, whole or not at all; gives the number of rows, and of those
    that are unanswered, for they lack what the model is asked about. training/data/prediction_files.py has the formats.

    Raises UserError for what is wrong with the rows, MlflowFailed where MLflow does not answer.
    """
    aside = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        inputs = {"file": str(file), "aside": str(aside)}
        figures = _run(model, {"out": str(out)}, inputs, on_events)
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    fsync(out.parent)
    return figures


def _run(model: Asked, asked: Mapping[str, Any], inputs: dict[str, str], on_events: OnEvents) -> dict[str, Any]:
    job = settings.home() / "jobs" / f"answer-{uuid.uuid4().hex[:12]}"
    columns = dict(model.columns)
    said = {"model": model.uri, "max_length": model.max_length, "columns": columns, **model.task, **asked}
    Job(program=PROGRAM, key=job.name, settings=said, inputs=inputs).write(job)
    try:
        outcome = run_job(
            job, python_argv(PROGRAM), env=environment(), on_events=on_events, stall_timeout_s=STALL_TIMEOUT_S
        )
        return require_finished(outcome).figures
    finally:
        shutil.rmtree(job, ignore_errors=True)
