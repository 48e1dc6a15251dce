"""The program that predicts rows with a registered model, from the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.registry.program_settings import PredictRowsSettings
from tasks.tracking.connection import mlflow_errors
from training.data.faults import Faults
from training.data.prediction_files import Values, Writer, complete_values, need_value, read
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job
from training.problems import Problem, UserError, full_disk

if TYPE_CHECKING:
    import pyarrow as pa

    from training.engine.serving import Predictor
    from training.recipe.column_types import Form
    from training.task_types.task_type import TaskType


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Predicts the `rows` of the settings, and returns `predictions`, a list of lines for people per row; or predicts
    the rows of the input `file` into the input `aside`, and returns the numbers of `rows` and of those
    `without_prediction`, which lack a value."""
    from training import task_types

    settings = PredictRowsSettings.model_validate(job.settings)
    task_type, columns = task_types.load(settings.task, settings.options), settings.columns
    forms = {column: task_type.columns[name].form for name, column in columns.items()}
    may_be_empty = {column for name, column in columns.items() if task_type.columns[name].may_be_empty}
    optional = {column for name, column in columns.items() if task_type.columns[name].optional} & may_be_empty
    if settings.rows is not None:
        rows = [_parse_values(row, forms, may_be_empty) for row in settings.rows]
        _check_rows(task_type, columns, [(range(1, len(rows) + 1), rows)], "option", "TEXT")
        predictor = _load_predictor(task_type, job_dir, settings)
        predictions = predictor.predict(_build_batch(task_type, columns, rows))
        return {"predictions": [task_type.lines(prediction) for prediction in predictions]}
    # The whole file is checked before the model is loaded: its problems are reported within seconds.
    file, aside, added = Path(job.inputs["file"]), Path(job.inputs["aside"]), [*task_type.record_types([])]
    batches = ((batch.numbers, batch.inputs) for batch in read(file, forms, added, may_be_empty, optional))
    total = _check_rows(task_type, columns, batches, "data", str(file))
    predictor = _load_predictor(task_type, job_dir, settings)
    done = without_prediction = 0
    try:
        with Writer(aside, Path(settings.out), task_type.record_types(predictor.labels)) as writer:
            for rows_of_file, inputs, _ in read(file, forms, added, may_be_empty, optional):
                complete = [values for values in inputs if values is not None]
                predicted = iter(predictor.predict(_build_batch(task_type, columns, complete)))
                writer.write(rows_of_file, [None if values is None else next(predicted) for values in inputs])
                done, without_prediction = done + len(inputs), without_prediction + len(inputs) - len(complete)
                events.progress(done=done, total=total)
    except OSError as error:
        if full := full_disk(aside.parent, error):
            raise full from error
        raise
    return {"rows": done, "without_prediction": without_prediction}


def _parse_values(row: Sequence[str], forms: Mapping[str, Form], may_be_empty: Collection[str]) -> Values:
    """The values of a row from the command line. Raises UserError for values that the task type does not accept."""
    given = [need_value(value, form, "option", "TEXT") for value, form in zip(row, forms.values(), strict=True)]
    values = complete_values(given, forms, may_be_empty)
    if values is None:
        raise UserError([Problem(kind="option", where="TEXT", message="is empty: there is nothing to predict.")])
    return values


def _check_rows(
    task_type: TaskType,
    columns: Mapping[str, str],
    batches: Iterable[tuple[Sequence[int], Sequence[Values | None]]],
    kind: str,
    where: str,
) -> int:
    """The number of rows. Raises UserError with all faults that the task type finds in them.

    Args:
        batches: the numbers of rows in their file, and their values.
        kind: of the problems.
        where: the file, or the argument of the command.
    """
    total, faults = 0, Faults()
    for numbers, inputs in batches:
        total += len(inputs)
        complete = {number: values for number, values in zip(numbers, inputs, strict=True) if values is not None}
        rows = _build_batch(task_type, [*columns], [*complete.values()])
        for name, fault, mask, detail in task_type.faults_on_request(rows):
            faulty = [number for number, is_faulty in zip(complete, mask, strict=True) if is_faulty]
            faults.add(where, "", f"{fault} in column {columns[name]!r}", faulty, detail)
    if problems := [
        Problem(kind=kind, where=row, message=f"{fault}: correct or remove {them}.")
        for _, row, fault, them in faults.summaries()
    ]:
        raise UserError(problems)
    return total


def _build_batch(task_type: TaskType, names: Iterable[str], rows: Sequence[Values]) -> pa.RecordBatch:
    """The rows with the types that load_data stores."""
    import pyarrow as pa

    stored = {"number": pa.float64(), "texts": pa.list_(pa.string())}
    types = {name: stored.get(task_type.columns[name].form, pa.string()) for name in names}
    columns = [pa.array([row[place] for row in rows], type_) for place, type_ in enumerate(types.values())]
    return pa.RecordBatch.from_arrays(columns, names=[*types])


def _load_predictor(task_type: TaskType, job_dir: Path, settings: PredictRowsSettings) -> Predictor:
    from training.engine.serving import Predictor

    return Predictor(task_type, *find_parts(fetch_model(settings.model, job_dir / "model")), settings.max_length)


def fetch_model(uri: str, into: Path) -> Path:
    """The folder of a logged model: its own if it is on this machine, else `into`, after the download.
    Raises MlflowFailed, and UserError if its files are missing."""
    from mlflow.artifacts import download_artifacts

    try:
        with mlflow_errors():
            into.mkdir(parents=True, exist_ok=True)
            found = Path(download_artifacts(artifact_uri=uri, dst_path=str(into)))
    except FileNotFoundError as error:
        raise _missing_files(uri, str(error)) from error
    if not any((part / "config.json").is_file() for part in find_parts(found)):
        raise _missing_files(uri, f"{found} has no model")
    return found


def _missing_files(uri: str, reason: str) -> UserError:
    message = f"the files of {uri} are missing ({reason}): restore them, or run the recipe again."
    return UserError([Problem(kind="registry", where="NAME", message=message)])


def find_parts(folder: Path) -> tuple[Path, Path]:
    """The folders of a logged model's weights and of its tokenizer."""
    code = folder / "artifacts" / "model"
    return (code, code) if code.is_dir() else (folder / "model", folder / "components" / "tokenizer")


if __name__ == "__main__":
    run_program(main)
