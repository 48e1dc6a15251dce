"""The program that logs a trained model to MLflow, compares the logged copy's predictions, and registers it.

MLFLOW_TRACKING_URI names the server: its URL may contain a password, and job.json must not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.cache.code import code_behind
from tasks.cache.store import link_or_copy
from tasks.home import mlflow_artifacts
from tasks.registry.versions import LOGGED_BY_CODE, logged_parts
from tasks.tracking.connection import find_files_here, mlflow_errors
from training.evaluation.stored_calibration import Calibration
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job, TaskSettings, sha256
from training.jobs.search_path import PROJECT, hide_package
from training.models.repository_files import part_of

if TYPE_CHECKING:
    import pyarrow as pa

    from training.task_types.task_type import TaskType


class LogModelSettings(TaskSettings):
    """Settings of this program."""

    experiment: str
    """Of MLflow."""
    run_id: str
    """Of MLflow."""
    registry: str
    """The name of the registered model."""
    inputs: list[str]
    """The columns that the model reads."""
    labels: list[str]
    """Names, in the order of their indices."""
    max_length: int
    """Tokens a row."""
    tags: dict[str, str]
    """Of the version."""
    requirements: list[str]
    """For pip, where the model is served."""
    probes: int
    """Rows whose predictions are compared with the stored ones."""
    examples: int
    """Probes that are stored as the model's examples."""
    tolerance: float
    """Between two predicted numbers."""
    calibration: Calibration | None = None


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Logs the model as safetensors, reloads it, compares its predictions and registers it. Returns the `version`.

    Inputs: model, a folder; rows and predictions, the files of an evaluated split.
    Raises RuntimeError, and registers nothing, if the reloaded model's predictions differ from the stored ones; raises
    MlflowFailed.
    """
    events.progress(done=0, total=3)
    scratch = job_dir / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # of a try that was killed
    scratch.mkdir()
    # If they are installed, transformers would import deepspeed to look for its engine, and peft to look for adapters,
    # which the exported weights contain: 2 seconds each.
    with mlflow_errors(), hide_package("deepspeed"), hide_package("peft"):
        return {"version": _log_and_register(scratch, job, LogModelSettings.model_validate(job.settings), events)}


def _log_and_register(scratch: Path, job: Job, settings: LogModelSettings, events: Events) -> str:
    import mlflow
    from mlflow import MlflowClient
    from mlflow.environment_variables import MLFLOW_HUGGINGFACE_MODEL_MAX_SHARD_SIZE
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, Schema

    from training import task_types

    folder = Path(job.inputs["model"])
    task_type = task_types.load(settings.task, settings.options)
    rows, stored = _read_probes(task_type, job, settings)
    inputs = rows.select(settings.inputs)
    # A pipeline of transformers gives the model's own probabilities.
    is_pipeline = task_type.pipeline and settings.calibration is None
    serves = task_type.serves if is_pipeline else {}
    mlflow.set_experiment(settings.experiment)
    # The default of transformers, by which the trained files were divided: then MLflow writes the same ones.
    MLFLOW_HUGGINGFACE_MODEL_MAX_SHARD_SIZE.set("50GB")
    flavor, model = (
        _build_pipeline_model(task_type, folder, settings)
        if is_pipeline
        else _build_python_model(task_type, folder, settings, scratch)
    )
    # Its metrics and parameters follow by the run's tracking: MLflow would read the history of each of the run's
    # metrics, and take those of one step, without their rows.
    started = mlflow.initialize_logged_model(settings.registry, source_run_id=settings.run_id)
    info = Model.log(
        artifact_path=None,
        flavor=_OfRun(flavor, settings.run_id),
        model_id=started.model_id,
        # With names: MLflow turns nameless texts that look like Python values into these values.
        signature=ModelSignature(
            inputs=Schema([ColSpec(_mlflow_type(field.type), field.name) for field in inputs.schema]),
            outputs=Schema([ColSpec(of, name) for name, of in serves.items()]) if serves else None,
        ),
        input_example=inputs.slice(0, settings.examples).to_pylist(),
        # Named, not inferred: to infer them, MLflow would load the model in another process.
        pip_requirements=settings.requirements,
        **model,
    )
    if is_pipeline:
        _replace_files(info.model_id, folder, scratch / "files", logged_parts(images=task_type.reads_images()))
    share_weights(MlflowClient().get_logged_model(info.model_id).artifact_location, folder, scratch / "shared")
    events.progress(done=1, total=3)
    logged = _fetch_logged(info.model_uri, scratch / "logged")
    predictions = _compare(task_type, logged, rows, stored, settings)
    # By its URI, MLflow would fetch the model once more, into a temporary folder that it never removes.
    served = mlflow.pyfunc.load_model(str(logged)).predict(inputs.to_pylist())
    same = task_type.same_served if is_pipeline else task_type.same_records
    if not same(served, predictions, settings.tolerance):
        raise RuntimeError("the registered model predicts otherwise if MLflow serves it")
    events.progress(done=2, total=3)
    # Last, and together with its tags: by the tags, a run that is resumed finds the version that it has registered.
    return str(mlflow.register_model(info.model_uri, settings.registry, tags=settings.tags).version)


class _OfRun(NamedTuple):
    """A flavor of MLflow that names the run in the model's file MLmodel, as Model.log does if it gets the run."""

    flavor: Any
    run_id: str

    def save_model(self, path: str, mlflow_model: Any, **options: Any) -> None:
        """As the flavor."""
        mlflow_model.run_id = self.run_id
        self.flavor.save_model(path=path, mlflow_model=mlflow_model, **options)


def _build_pipeline_model(task_type: TaskType, folder: Path, settings: LogModelSettings) -> tuple[Any, dict[str, Any]]:
    """The flavor, and the arguments of Model.log, for a model that MLflow serves by a pipeline of transformers."""
    import mlflow

    from training.models import loading

    own = task_type.preprocessor(folder)
    read_by = {"tokenizer": loading.load_tokenizer(folder)} if own is None else {"image_processor": own.processor}
    # A served model truncates long texts as training did.
    truncation = {"truncation": True, "max_length": settings.max_length} if own is None else {}
    return mlflow.transformers, {
        "transformers_model": {"model": loading.load_trained(task_type, folder), **read_by},
        "task": task_type.hub_task,
        "model_config": truncation,
        "validate_serving_input": False,  # the caller compares the served predictions
    }


def _replace_files(model_id: str, folder: Path, aside: Path, parts: Mapping[str, str]) -> None:
    """Replaces the configurations and the tokenizer that MLflow has written anew by the files of the folder. A training
    that starts from the registered version then has the same bytes on every machine."""
    from mlflow import MlflowClient

    for part, place in parts.items():
        (aside / part).mkdir(parents=True)
        for file in folder.iterdir():
            if part_of(file.name) == part and ".safetensors" not in file.name:
                shutil.copyfile(file, aside / part / file.name)
        MlflowClient().log_model_artifacts(model_id, str(aside / part), place)


def share_weights(location: str, folder: Path, aside: Path) -> None:
    """Replaces MLflow's copies of the weights in a folder by hard links: the disk has them once. Nothing changes
    for copies with other bytes, outside the folder of this home's MLflow, or on another file system.

    Either file may be removed without the other. Code that writes into one of them would change both: the digest of the
    artifact notices it.
    """
    root = find_files_here(location)
    if root is None or not root.resolve().is_relative_to(mlflow_artifacts().resolve()):
        return
    for copy in root.resolve().rglob("*.safetensors"):
        stored = folder / copy.name
        if stored.is_file() and not copy.samefile(stored) and sha256(copy) == sha256(stored):
            aside.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.link(stored.resolve(), aside)  # os.link would link a symbolic link itself
                os.replace(aside, copy)


def _build_python_model(
    task_type: TaskType, folder: Path, settings: LogModelSettings, scratch: Path
) -> tuple[Any, dict[str, Any]]:
    """The flavor, and the arguments of Model.log, for any other model: its folder, with its calibration, and a copy of
    the package `training` and of the user's task type with its imports; no pickle. The copies are made in `scratch`."""
    import mlflow

    code = scratch / "code"
    if settings.calibration:
        folder = Path(shutil.copytree(folder, scratch / "calibrated" / folder.name, copy_function=link_or_copy))
        settings.calibration.write(folder)
    for name, source in code_behind(["training.engine.predictor", type(task_type).__module__]).files.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.file, code / name)
    shutil.copytree(PROJECT / "training", code / "training", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc"))
    return mlflow.pyfunc, {
        "python_model": str(Path(__file__).with_name("pyfunc_model.py")),
        "artifacts": {"model": str(folder)},
        "model_config": settings.model_dump(include={"task", "options", "max_length"}),
        "code_paths": sorted(map(str, code.iterdir())),
    }


def _mlflow_type(stored: pa.DataType) -> Any:
    """MLflow's type of an input column."""
    from mlflow.types import DataType
    from mlflow.types.schema import Array
    from pyarrow import types

    if types.is_list(stored):
        return Array(DataType.string)
    return DataType.double if types.is_floating(stored) else DataType.string


def _read_probes(
    task_type: TaskType, job: Job, settings: LogModelSettings
) -> tuple[pa.RecordBatch, list[dict[str, Any]]]:
    """The first rows of the split, with their inputs and targets, and their stored predictions."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.memory_map(job.inputs["rows"]) as file:
        rows = pa.ipc.open_file(file).get_batch(0).slice(0, settings.probes)
    targets = {name for name, column in task_type.columns.items() if column.target}
    rows = rows.select([name for name in rows.schema.names if name in targets.union(settings.inputs)])
    stored = pq.read_table(job.inputs["predictions"]).slice(0, rows.num_rows)
    if settings.calibration:
        return rows, settings.calibration.to_records(task_type, stored)
    return rows, task_type.to_records(stored, settings.labels)


def _fetch_logged(uri: str, into: Path) -> Path:
    """The folder of the model that this program has logged: a copy below `into`."""
    from mlflow.artifacts import download_artifacts

    into.mkdir(parents=True, exist_ok=True)
    return Path(download_artifacts(artifact_uri=uri, dst_path=str(into)))


def _find_parts(folder: Path, *, images: bool) -> tuple[Path, Path]:
    """The folders of a logged model's weights and of its tokenizer, or of the image processor."""
    code, parts = folder / LOGGED_BY_CODE, logged_parts(images=images)
    return (code, code) if code.is_dir() else (folder / parts["model"], folder / parts["tokenizer"])


def _compare(
    task_type: TaskType,
    folder: Path,
    rows: pa.RecordBatch,
    stored: Sequence[Mapping[str, Any]],
    settings: LogModelSettings,
) -> list[dict[str, Any]]:
    """The predictions of the logged model. Raises RuntimeError if they differ from the stored ones."""
    from training.engine.predictor import Predictor

    parts = _find_parts(folder, images=task_type.reads_images())
    predictor = Predictor(task_type, *parts, settings.max_length, calibration=settings.calibration)
    predictions = predictor.predict(rows)
    for row, now, before in zip(rows.to_pylist(), predictions, stored, strict=True):
        if not task_type.same_prediction(now, before, settings.tolerance):
            raise RuntimeError(
                f"the registered model predicts {now} for {row!r}, and {before} was stored when it was evaluated"
            )
    return predictions


if __name__ == "__main__":
    run_program(main)
