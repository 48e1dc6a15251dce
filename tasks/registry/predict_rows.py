"""The program that asks a registered model, of the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """Settings: model (an MLflow model URI), task type, max_length (tokens), columns (what the rows call each that the
    task type is shown), and either rows (lists of a value a column), or out, the path of what is to be written; of
    that the input `aside` is filled from the rows of the input `file`.

    Figures: answers, lines for people, one list a row; or rows, and how many were unanswered for want of a value.
    """
    from training import task_types

    say = job.settings
    task_type = task_types.from_settings(say)
    forms = {of: task_type.columns[name].form for name, of in say["columns"].items()}
    blank = {of for name, of in say["columns"].items() if task_type.columns[name].may_be_empty}
    optional = {of for name, of in say["columns"].items() if task_type.columns[name].optional} & blank
    if "rows" in say:
        rows = [_values(row, forms, blank) for row in say["rows"]]
        _need_right(task_type, say["columns"], [(range(1, len(rows) + 1), rows)], "option", "TEXT")
        predictor = _predictor(task_type, job_dir, say)
        return {
            "answers": [
                task_type.lines(answer) for answer in predictor.predict(_batch(task_type, say["columns"], rows))
            ]
        }
    # All of it, before a model is loaded: what is wrong with a file is told within seconds.
    file, aside, added = Path(job.inputs["file"]), Path(job.inputs["aside"]), [*task_type.record_types([])]
    batches = ((batch.numbers, batch.inputs) for batch in read(file, forms, added, blank, optional))
    total = _need_right(task_type, say["columns"], batches, "data", str(file))
    predictor = _predictor(task_type, job_dir, say)
    done = unanswered = 0
    try:
        with Writer(aside, Path(say["out"]), task_type.record_types(predictor.labels)) as writer:
            for rows_of_file, inputs, _ in read(file, forms, added, blank, optional):
                there = [place for place, values in enumerate(inputs) if values is not None]
                answers: list[dict[str, Any] | None] = [None] * len(inputs)
                given = predictor.predict(_batch(task_type, say["columns"], [inputs[place] or () for place in there]))
                for place, answer in zip(there, given, strict=True):
                    answers[place] = answer
                writer.write(rows_of_file, answers)
                done, unanswered = done + len(inputs), unanswered + len(inputs) - len(there)
                events.progress(done=done, total=total)
    except OSError as error:
        if full := full_disk(aside.parent, error):
            raise full from error
        raise
    return {"rows": done, "unanswered": unanswered}


def _values(row: Sequence[str], forms: Mapping[str, Form], blank: Collection[str]) -> Values:
    """What was typed, as rows have it. Raises UserError for what the task type does not take."""
    given = [need_value(value, form, "option", "TEXT") for value, form in zip(row, forms.values(), strict=True)]
    values = complete_values(given, forms, blank)
    if values is None:
        raise UserError([Problem(kind="option", where="TEXT", message="is empty: there is nothing to ask about.")])
    return values


def _need_right(
    task_type: TaskType,
    columns: Mapping[str, str],
    batches: Iterable[tuple[Sequence[int], Sequence[Values | None]]],
    of: str,
    where: str,
) -> int:
    """How many rows there are, given their numbers and values. Raises UserError with all that the task type finds
    wrong with them, as problems of this task type."""
    total, faults = 0, Faults()
    for numbers, inputs in batches:
        total += len(inputs)
        there = [place for place, values in enumerate(inputs) if values is not None]
        rows = _batch(task_type, [*columns], [inputs[place] or () for place in there])
        for name, what, wrong, of_first in task_type.faults_on_request(rows):
            faulty = [numbers[place] for place, bad in zip(there, wrong, strict=True) if bad]
            faults.add(where, "", f"{what} in column {columns[name]!r}", faulty, of_first)
    if problems := [
        Problem(kind=of, where=row, message=f"{said}: correct or remove {them}.")
        for _, row, said, them in faults.summaries()
    ]:
        raise UserError(problems)
    return total


def _batch(task_type: TaskType, names: Sequence[str], rows: Sequence[Values]) -> pa.RecordBatch:
    """Rows as load_data stores those of the task type."""
    import pyarrow as pa

    stored = {"number": pa.float64(), "texts": pa.list_(pa.string())}
    types = [stored.get(task_type.columns[name].form, pa.string()) for name in names]
    columns = [pa.array([row[place] for row in rows], type_) for place, type_ in enumerate(types)]
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def _predictor(task_type: TaskType, job_dir: Path, say: Mapping[str, Any]) -> Predictor:
    from training.engine.serving import Predictor

    return Predictor(task_type, *parts_of(logged(say["model"], job_dir / "model")), say["max_length"])


def logged(uri: str, into: Path) -> Path:
    """The folder of a logged model: where it lies, if that is on this machine, else fetched into the folder `into`.
    Raises MlflowFailed, and UserError if its files are gone."""
    from mlflow.artifacts import download_artifacts

    try:
        with mlflow_errors():
            into.mkdir(parents=True, exist_ok=True)
            found = Path(download_artifacts(artifact_uri=uri, dst_path=str(into)))
    except FileNotFoundError as error:
        raise _gone(uri, str(error)) from error
    if not any((part / "config.json").is_file() for part in parts_of(found)):
        raise _gone(uri, f"{found} holds no model")
    return found


def _gone(uri: str, why: str) -> UserError:
    message = f"the files of {uri} are not there any more ({why}): put them back, or run the recipe again."
    return UserError([Problem(kind="registry", where="NAME", message=message)])


def parts_of(folder: Path) -> tuple[Path, Path]:
    """Where a logged model has its weights and its tokenizer."""
    code = folder / "artifacts" / "model"
    return (code, code) if code.is_dir() else (folder / "model", folder / "components" / "tokenizer")


if __name__ == "__main__":
    run_program(main)
