"""The program that logs a trained model to MLflow, asks the logged copy, and registers it.

The server is the one that MLFLOW_TRACKING_URI names: its URL may hold a password, which job.json must not.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cache.code import code_behind
from tasks.registry.predict_rows import logged, parts_of
from tasks.tracking.connection import mlflow_errors
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job
from training.jobs.search_path import PROJECT, hide_package

if TYPE_CHECKING:
    import pyarrow as pa

    from training.task_types.task_type import TaskType


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Logs the model as safetensors under the MLflow run, reloads it, compares its answers and registers it.

    Settings: experiment, run_id, registry, task type, inputs (the columns that the model is shown), labels (their
    names), max_length (tokens), tags, requirements, probes (how many rows it is asked about), examples (how many of
    them it keeps as examples), tolerance (of a number that it answers). Inputs: model, a folder; rows and predictions,
    the files of an evaluated split. Figures: version. Raises RuntimeError, and registers nothing, where the reloaded
    model answers otherwise than was stored; MlflowFailed where MLflow does not do its part.
    """
    events.progress(done=0, total=3)
    # Where deepspeed is installed, transformers would look for an engine of it: 2 seconds.
    with mlflow_errors(), hide_package("deepspeed"):
        return {"version": _log_and_register(job_dir, job, events)}


def _log_and_register(job_dir: Path, job: Job, events: Events) -> str:
    import mlflow
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, Schema

    from training import task_types

    say, folder = job.settings, Path(job.inputs["model"])
    task_type = task_types.from_settings(say)
    rows, stored = _probes(task_type, job)
    shown = rows.select(say["inputs"])
    mlflow.set_experiment(say["experiment"])
    info = Model.log(
        artifact_path=None,
        name=say["registry"],
        run_id=say["run_id"],
        # By name: of texts without one, MLflow takes those that look like values of Python's for these values.
        signature=ModelSignature(
            inputs=Schema([ColSpec(_mlflow_type(field.type), field.name) for field in shown.schema]),
            outputs=Schema([ColSpec(of, name) for name, of in task_type.serves.items()]) if task_type.serves else None,
        ),
        input_example=shown.slice(0, say["examples"]).to_pylist(),
        # Named, not inferred: inferring loads the model once more in yet another process.
        pip_requirements=say["requirements"],
        **(
            _as_pipeline(task_type, folder, say)
            if task_type.pipeline
            else _as_code(task_type, folder, say, job_dir / "code")
        ),
    )
    events.progress(done=1, total=3)
    answers = _compared(task_type, logged(info.model_uri, job_dir / "logged"), rows, stored, say)
    served = mlflow.pyfunc.load_model(info.model_uri).predict(shown.to_pylist())
    if not task_type.same_served(served, answers, say["tolerance"]):
        raise RuntimeError("the registered model, asked as MLflow serves it, answers otherwise than by itself")
    events.progress(done=2, total=3)
    # Last, and with its tags at once: a run that goes on after a kill knows a version by them, or makes another.
    return str(mlflow.register_model(info.model_uri, say["registry"], tags=say["tags"]).version)


def _as_pipeline(task_type: TaskType, folder: Path, say: Mapping[str, Any]) -> dict[str, Any]:
    """What MLflow is given of a model that it serves by a pipeline of transformers."""
    import mlflow
    from transformers import AutoTokenizer

    from training.models import loading

    return {
        "flavor": mlflow.transformers,
        "transformers_model": {
            "model": loading.load_trained(task_type, folder),
            "tokenizer": AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
        },
        "task": task_type.hub_task,
        # A served model cuts long texts as training did.
        "model_config": {"truncation": True, "max_length": say["max_length"]},
        "validate_serving_input": False,  # below, and held against what is known
    }


def _as_code(task_type: TaskType, folder: Path, say: Mapping[str, Any], code: Path) -> dict[str, Any]:
    """Of any other: its folder, and the code that asks it, gathered in `code`, with what the author's of the task type
    imports of their own; no pickle."""
    import mlflow

    for name, source in code_behind(["training.engine.serving", type(task_type).__module__]).files.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.file, code / name)
    shutil.copytree(PROJECT / "training", code / "training", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc"))
    return {
        "flavor": mlflow.pyfunc,
        "python_model": str(Path(__file__).with_name("served.py")),
        "artifacts": {"model": str(folder)},
        "model_config": {name: say.get(name) for name in ("task", "options", "max_length")},
        "code_paths": sorted(map(str, code.iterdir())),
    }


def _mlflow_type(stored: pa.DataType) -> Any:
    """What MLflow calls the type of a column that the model is shown."""
    from mlflow.types import DataType
    from mlflow.types.schema import Array
    from pyarrow import types

    if types.is_list(stored):
        return Array(DataType.string)
    return DataType.double if types.is_floating(stored) else DataType.string


def _probes(task_type: TaskType, job: Job) -> tuple[pa.RecordBatch, list[dict[str, Any]]]:
    """The first rows of the split, with what the model is shown and is to say, where that is no label, and the answers
    that were stored for them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    say = job.settings
    with pa.memory_map(job.inputs["rows"]) as file:
        rows = pa.ipc.open_file(file).get_batch(0).slice(0, say["probes"])
    said = {name for name, column in task_type.columns.items() if column.target}
    rows = rows.select([name for name in rows.schema.names if name in said.union(say["inputs"])])
    answers = pq.read_table(job.inputs["predictions"]).slice(0, rows.num_rows)
    return rows, task_type.to_records(answers, say["labels"])


def _compared(
    task_type: TaskType, folder: Path, rows: pa.RecordBatch, stored: Sequence[Mapping[str, Any]], say: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What the model that was logged answers. Raises RuntimeError where that is otherwise than was stored."""
    from training.engine.serving import Predictor

    predictor = Predictor(task_type, *parts_of(folder), say["max_length"])
    answers = predictor.predict(rows)
    for row, given, before in zip(rows.to_pylist(), answers, stored, strict=True):
        if not task_type.same_prediction(given, before, say["tolerance"]):
            raise RuntimeError(
                f"the registered model answers {given} to {row!r}, and {before} was stored when it was evaluated"
            )
    return answers


if __name__ == "__main__":
    run_program(main)
