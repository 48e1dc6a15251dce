"""Predictions for single rows by a registered model, as `finetune predict NAME TEXT` makes them: the program and its
start."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tasks.cache.garbage_collection import in_use
from tasks.jobs.commands import python_argv
from tasks.jobs.launch import require_finished, run_job
from tasks.jobs.retries import DEFAULT_STALL_TIMEOUT_S
from tasks.registry.model_spec import ModelSpec
from tasks.registry.pinned_versions import find_folders_for_job
from training import task_types
from training.data.arrow_columns import from_json, texts_as_json
from training.data.casting import Values, to_batch
from training.data.images import UnusableImage, examine, read_file
from training.data.row_dicts import BOOLEANS
from training.data.row_problems import RowProblems
from training.evaluation.stored_calibration import Calibration, describe_review
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job, TaskSettings
from training.problems import Problem, UserError
from training.recipe.column_types import EXAMPLES

if TYPE_CHECKING:
    from training.recipe.column_types import Form
    from training.task_types.task_type import TaskType

PROGRAM = "tasks.prediction.single_rows"


class PredictRowsSettings(TaskSettings):
    """Settings of this program."""

    max_length: int
    """Tokens a row."""
    columns: dict[str, str]
    """The rows' names for the columns that the model reads, by the task type's."""
    rows: list[list[str]]
    """A value a column."""
    calibration: Calibration | None = None


def split_into_rows(model: ModelSpec, given: Sequence[str]) -> list[list[str]]:
    """Splits the given values into rows: a value for each column, or for each column that is not optional.

    Raises UserError if they make no whole rows.
    """
    columns = task_types.class_of(model.task["task"]).columns
    every_column = list(model.columns)
    needed = [name for name in every_column if not (columns[name].optional and columns[name].may_be_empty)]
    for names in (every_column, needed):
        if names and not len(given) % len(names):
            starts = range(0, len(given), len(names))
            rows = [dict(zip(names, given[start : start + len(names)], strict=True)) for start in starts]
            return [[row.get(name, "") for name in every_column] for row in rows]
    message = (
        f"the model takes {len(every_column)} values at a time ({', '.join(model.columns.values())}), and there are "
        f'{len(given)}. Write "" for an optional value.'
    )
    raise UserError.of("option", "TEXT", message)


def predict_values(model: ModelSpec, rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The predictions for rows of one value per column, each as lines of text.

    Raises UserError for values that the task type does not accept, and MlflowFailed if MLflow does not answer.
    """
    return list(_predict(model, rows)["predictions"])


def predict_records(model: ModelSpec, rows: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """As `predict_values`, each as the task type's record."""
    return list(_predict(model, rows)["records"])


def _predict(model: ModelSpec, rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The result of the program."""
    with in_use(), find_folders_for_job("predict", model.pinned) as (work, folders):
        settings = PredictRowsSettings(
            max_length=model.max_length,
            columns=dict(model.columns),
            rows=[list(row) for row in rows],
            calibration=model.calibration,
            **model.task,
        )
        inputs = {part: str(folder) for part, folder in folders.items()}
        Job(program=PROGRAM, key=work.key, settings=settings.model_dump(), inputs=inputs).write(work.job)
        outcome = run_job(work.job, python_argv(PROGRAM), env={}, stall_timeout_s=DEFAULT_STALL_TIMEOUT_S)
        return require_finished(outcome).result


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Predicts the `rows` of the settings. Returns their `records`, and `predictions`, the lines of each for people."""
    from training.engine.predictor import Predictor

    settings = PredictRowsSettings.model_validate(job.settings)
    task_type, columns = task_types.load(settings.task, settings.options), settings.columns
    forms = {column: task_type.columns[name].form for name, column in columns.items()}
    may_be_empty = {column for name, column in columns.items() if task_type.columns[name].may_be_empty}
    rows = [_parse_values(row, forms, may_be_empty) for row in settings.rows]
    _check_rows(task_type, columns, rows)
    model, tokenizer = (Path(job.inputs[name]) for name in ("model", "tokenizer"))
    predictor = Predictor(task_type, model, tokenizer, settings.max_length, calibration=settings.calibration)
    predictions = predictor.predict(to_batch(task_type, columns, rows))
    if predictor.beyond or predictor.refused:
        raise UserError(Problem(kind="model", where="TEXT", message=message) for message in predictor.warnings())
    for message in predictor.warnings():
        events.warning(message)
    lines = [[*task_type.lines(one), *describe_review(one)] for one in predictions]
    return {"records": predictions, "predictions": lines}


def _parse_values(row: Sequence[str], forms: Mapping[str, Form], may_be_empty: Collection[str]) -> Values:
    """The values of a row from the command line. Raises UserError for values that the task type does not accept."""
    given = []
    for value, (name, form) in zip(row, forms.items(), strict=True):
        try:
            given.append(_parse_value(value, form))
        except ValueError as expected:
            raise UserError.of("option", "TEXT", f"{value!r:.60} is given, where {expected} belongs.") from expected
        if given[-1] is None:
            if name not in may_be_empty:
                raise UserError.of("option", "TEXT", "is empty: there is nothing to predict.")
            given[-1] = {"text": "", "texts": []}.get(form)
    return tuple(given)


def _parse_value(value: str, form: Form) -> Any:
    """A value of that form as it is stored; nested ones are parsed from JSON. None for a missing value.

    Raises ValueError for any other value, with the description of a right one.
    """
    if not value.strip():
        return None
    if form == "text":
        try:
            value.encode()
        except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
            raise ValueError("a text") from None
        return value
    if form == "image":
        return _read_image(value)
    if form == "number":
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(value)):
                return number
        raise ValueError("a number")
    if form == "boolean":
        if (known := BOOLEANS.get(value.strip().lower())) is not None:
            return known
        raise ValueError("true or false")
    try:
        cell = pa.array([value])
        column, wrong = from_json(texts_as_json(cell) if form == "content" else cell, "", form)
    except (TypeError, ValueError, RecursionError):
        wrong = {0: ("", "", "")}
    if wrong:
        raise ValueError(f"a value such as {EXAMPLES[form]}")
    return column[0].as_py() or None


def _read_image(path: str) -> str:
    """The image of a file. Raises ValueError, with the description of a right one."""
    file = Path(path).expanduser().absolute()
    try:
        image = read_file(file.name, str(file.parent))
    except UnusableImage as error:
        raise ValueError(f"the path of an image (it {error.problem})") from error
    if problem := examine(image).problem:
        raise ValueError(f"the path of an image (it {problem})")
    return image


def _check_rows(task_type: TaskType, columns: Mapping[str, str], rows: Sequence[Values]) -> None:
    """Raises UserError with all problems that the task type finds in the rows."""
    found = RowProblems()
    for name, description, mask, value in task_type.row_problems_on_request(to_batch(task_type, columns, rows)):
        numbers = [number for number, has_problem in enumerate(mask, 1) if has_problem]
        found.add("TEXT", "", f"{description} in column {columns[name]!r}", numbers, value)
    if problems := [
        Problem(kind="option", where=row, message=f"{description}: correct or remove {them}.")
        for _, row, description, them in found.summaries()
    ]:
        raise UserError(problems)


if __name__ == "__main__":
    run_program(main)
