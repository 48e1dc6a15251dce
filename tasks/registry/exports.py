"""Exports of registered versions: the released ones are logged with the version, others are made on request."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cache.results import Artifact, ExportFigures
from tasks.home import home
from tasks.jobs.commands import python_argv
from tasks.jobs.launch import require_finished, run_job
from tasks.registry.predict_rows import fetch_model, find_parts
from tasks.registry.prediction_job import ModelSpec
from tasks.registry.program_settings import ExportVersionSettings
from tasks.registry.versions import EXPORTS_TAG, need_model, need_version, read_tag
from tasks.tracking.connection import build_environment, connect, mlflow_errors
from training import task_types
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job
from training.models.repository_files import part_of
from training.problems import UserError
from training.recipe.tables.exports import EXPORTS, INSTALL, OUTPUTS, missing_packages

if TYPE_CHECKING:
    from mlflow import MlflowClient


PROGRAM = "tasks.registry.exports"
STALL_TIMEOUT_S = 1800.0
FOLDER = "export"
"""The folder of exports among the files of a version's MLflow run."""


def released_exports(refs: Mapping[str, Artifact]) -> dict[str, Any]:
    """The figures of the released exports by format, from the artifacts of a run by stage."""
    figures = refs["compare_exports"].figures if "compare_exports" in refs else {}
    return {name: one for name, one in figures.items() if one["released"]}


def export_files(folder: Path, name: str) -> list[Path]:
    """The ONNX file of a format, and the file with its weights if they are beside it."""
    file = folder / EXPORTS[name]
    return sorted(file.parent.glob(f"{file.name}*"))


def log_exports(
    client: MlflowClient, name: str, version: str, refs: Mapping[str, Artifact], exports: Mapping[str, Any]
) -> None:
    """Logs the released exports to the version's MLflow run, and their figures as its tag, if it lacks them."""
    if not exports:
        return
    registered = client.get_model_version(name, version)
    text = json.dumps(exports, sort_keys=True)
    if registered.tags.get(EXPORTS_TAG, "{}") == text:
        return
    for export in exports:
        for file in export_files(refs["export"].path, export):
            client.log_artifact(registered.run_id, str(file), f"{FOLDER}/{Path(EXPORTS[export]).parent}")
    client.set_model_version_tag(name, version, EXPORTS_TAG, text)


def export_version(model: ModelSpec, name: str, out: Path) -> Any:
    """Writes a registered version to the new or empty folder `out`, which appears whole: in one of the formats, or with
    `safetensors` as it is stored.
    Returns the figures of an export that was released with the version; None for one that is made now.

    Raises UserError if the model has no such export or a package is missing; MlflowFailed if MLflow does not answer.
    """
    with mlflow_errors():
        client = connect()
        version = need_version(client, need_model(client, model.name), version=model.version)
    released = read_tag(version, EXPORTS_TAG, dict[str, ExportFigures], "{}").get(name)
    if name in EXPORTS and released is None:
        _require_export(name, task_types.class_of(model.task["task"]).auto_class)
    job = home() / "jobs" / f"export-{uuid.uuid4().hex[:12]}"
    values = ExportVersionSettings(
        model=model.uri, export=name, run_id=version.run_id if released else None, **model.task
    )
    Job(program=PROGRAM, key=job.name, settings=values.model_dump()).write(job)
    try:
        require_finished(run_job(job, python_argv(PROGRAM), env=build_environment(), stall_timeout_s=STALL_TIMEOUT_S))
        aside = out.absolute().with_name(f".{out.absolute().name}-{job.name}")
        shutil.copytree(job / OUTPUT, aside)
        aside.rename(out.absolute())
    finally:
        shutil.rmtree(job, ignore_errors=True)
    return released.model_dump(mode="json") if released else None


def _require_export(name: str, auto_class: str) -> None:
    if auto_class not in OUTPUTS:
        message = (
            f"{name!r} is for models of {', '.join(OUTPUTS)}, and this is one of {auto_class}: choose safetensors."
        )
    elif missing := missing_packages():
        message = f"{name!r} needs {', '.join(missing)}, not installed here: install the extra, `{INSTALL}`."
    else:
        return
    raise UserError.of("option", "FORMAT", message)


WEIGHTS = "model.safetensors"


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Writes the folder. Raises UserError, MlflowFailed."""
    from training import task_types

    values, out = ExportVersionSettings.model_validate(job.settings), job_dir / OUTPUT
    task_type = task_types.load(values.task, values.options)
    weights, tokenizer = find_parts(fetch_model(values.model, job_dir / "model"))
    for folder in (tokenizer, weights):  # where both have a file, that of the model counts
        for file in sorted(folder.iterdir()):
            if part_of(file.name) and ".safetensors" not in file.name:  # no pickles, and nothing that is not checked
                shutil.copyfile(file, out / file.name)
    if values.export not in EXPORTS:
        merge_shards(weights, out / WEIGHTS)
        for name, text in task_type.published_files(weights).items():
            (out / name).write_text(text, encoding="utf-8")
    elif values.run_id is None:
        from training.models import onnx_files

        onnx_files.export(task_type.auto_class, weights, [values.export], out)
    else:
        download(values.run_id, EXPORTS[values.export], out)
    return {}


def merge_shards(folder: Path, file: Path) -> None:
    """Writes all weights of a folder as one safetensors file, as most converters and servers read them."""
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        shutil.copyfile(shards[0], file)
        return
    from safetensors.torch import load_file, save_file

    save_file({name: tensor for shard in shards for name, tensor in load_file(shard).items()}, file, {"format": "pt"})


def download(run_id: str, name: str, out: Path) -> None:
    """Downloads a released export, with the file of its weights if they are beside it."""
    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    with mlflow_errors():
        for file in MlflowClient().list_artifacts(run_id, f"{FOLDER}/{Path(name).parent}"):
            if Path(file.path).name.startswith(Path(name).name):
                place = out / Path(name).parent
                place.mkdir(exist_ok=True)
                download_artifacts(run_id=run_id, artifact_path=file.path, dst_path=str(place))


if __name__ == "__main__":
    run_program(main)
