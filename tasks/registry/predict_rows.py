"""The program that predicts rows with a registered model, from the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tasks.registry.program_settings import PredictRowsSettings
from tasks.registry.versions import LOGGED_PARTS
from tasks.tracking.connection import mlflow_errors
from training.data.arrow_columns import as_json, from_json, texts_as_json
from training.data.casting import Values, to_batch
from training.data.row_dicts import BOOLEANS
from training.data.row_problems import RowProblems
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job
from training.local_files import find_foreign
from training.models.repository_files import REGISTRY_ROOMS, has_weights, part_of, require_no_other_files
from training.problems import Problem, UserError
from training.recipe.column_types import EXAMPLES

if TYPE_CHECKING:
    from training.recipe.column_types import Form
    from training.task_types.task_type import TaskType


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Predicts the `rows` of the settings, and returns `predictions`, a list of lines for people per row."""
    from training import task_types
    from training.engine.serving import Predictor

    settings = PredictRowsSettings.model_validate(job.settings)
    task_type, columns = task_types.load(settings.task, settings.options), settings.columns
    forms = {column: task_type.columns[name].form for name, column in columns.items()}
    may_be_empty = {column for name, column in columns.items() if task_type.columns[name].may_be_empty}
    rows = [_parse_values(row, forms, may_be_empty) for row in settings.rows]
    _check_rows(task_type, columns, rows)
    folder = fetch_model(settings.model, job_dir / "model")
    predictor = Predictor(task_type, *find_parts(folder), settings.max_length)
    predictions = predictor.predict(to_batch(task_type, columns, rows))
    if predictor.beyond:
        raise UserError(Problem(kind="model", where="TEXT", message=message) for message in predictor.warnings())
    for message in predictor.warnings():
        events.warning(message)
    return {"predictions": [task_type.lines(prediction) for prediction in predictions]}


def _parse_values(row: Sequence[str], forms: Mapping[str, Form], may_be_empty: Collection[str]) -> Values:
    """The values of a row from the command line. Raises UserError for values that the task type does not accept."""
    given = []
    for value, (name, form) in zip(row, forms.items(), strict=True):
        try:
            given.append(_parse_value(value, form))
        except ValueError as expected:
            raise UserError.of("option", "TEXT", f"{value!r:.60} is given, where {expected} belongs.") from expected
        if given[-1] is None and name not in may_be_empty:
            raise UserError.of("option", "TEXT", "is empty: there is nothing to predict.")
    return _complete_values(given, forms)


def _complete_values(values: Sequence[Any], columns: Mapping[str, Form]) -> Values:
    """A row's values as they are stored, with empty texts and lists for missing ones."""
    nothing: dict[str, Any] = {"text": "", "texts": []}
    return tuple(
        nothing.get(form) if value is None else value for value, form in zip(values, columns.values(), strict=True)
    )


def _parse_value(value: Any, form: Form) -> Any:
    """A value of that form as it is stored; nested ones are parsed from JSON. None for a missing value.

    Raises ValueError for any other value, with the description of a right one.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if form == "text":
        if _is_text(value):
            return value
        raise ValueError("a text")
    if form == "number":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
        raise ValueError("a number")
    if form == "boolean":
        known = BOOLEANS.get(value.strip().lower() if isinstance(value, str) else str(value).lower())
        if known is not None:
            return known
        raise ValueError("true or false")
    try:
        cell = pa.array([value if isinstance(value, str) else as_json(value)])
        column, wrong = from_json(texts_as_json(cell) if form == "content" else cell, "", form)
    except (TypeError, ValueError, RecursionError):
        wrong = {0: ("", "", "")}
    if wrong:
        raise ValueError(f"a value such as {EXAMPLES[form]}")
    return column[0].as_py() or None


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold
        return False


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


def fetch_model(uri: str, into: Path) -> Path:
    """The folder of a logged model: a copy below `into`. Raises MlflowFailed, and UserError if its files are missing,
    are links to elsewhere, or name other files."""
    from mlflow.artifacts import download_artifacts

    try:
        with mlflow_errors():
            _require_no_links(uri)
            into.mkdir(parents=True, exist_ok=True)
            found = Path(download_artifacts(artifact_uri=uri, dst_path=str(into)))
    except FileNotFoundError as error:
        raise _missing_files(uri, str(error)) from error
    require_no_other_files(*find_parts(found))
    weights, _ = find_parts(found)
    if not (weights / "config.json").is_file():
        raise _missing_files(uri, f"{found} has no model")
    if not has_weights(file.name for file in weights.iterdir()):
        raise _missing_files(uri, "it has no weights in safetensors")
    return found


def _require_no_links(uri: str) -> None:
    """Raises UserError for files that MLflow would copy here from elsewhere, if the artifacts are on this machine."""
    from mlflow import MlflowClient
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    name, _, version = uri.removeprefix("models:/").rpartition("/")
    if uri.startswith("models:/") and name:  # not models:/ID, which this process has logged
        uri = MlflowClient().get_model_version_download_uri(name, version)
    if is_local_uri(uri):
        parts = [part for part in find_parts(Path(local_file_uri_to_path(uri))) if part.is_dir()]
        files = [str(file) for part in parts for file in part.iterdir() if part_of(file.name)]
        if foreign := find_foreign(files, REGISTRY_ROOMS, "model"):
            raise UserError(foreign)


def _missing_files(uri: str, reason: str) -> UserError:
    message = f"the files of {uri} are missing ({reason}): restore them, or run the recipe again."
    return UserError.of("registry", "NAME", message)


def find_parts(folder: Path) -> tuple[Path, Path]:
    """The folders of a logged model's weights and of its tokenizer."""
    code = folder / "artifacts" / "model"
    return (code, code) if code.is_dir() else (folder / LOGGED_PARTS["model"], folder / LOGGED_PARTS["tokenizer"])


if __name__ == "__main__":
    run_program(main)
