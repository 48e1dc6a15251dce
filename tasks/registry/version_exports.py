"""Exports of registered versions: the released ones are logged with the version, others are made on request, by a
program that writes a version as a folder for other tools."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from tasks.cache.digests import Digests
from tasks.cache.garbage_collection import in_use
from tasks.cache.results import Artifact
from tasks.home import home, tracking_uri
from tasks.jobs.commands import python_argv
from tasks.jobs.launch import require_finished, run_job
from tasks.registry.model_spec import ModelSpec
from tasks.registry.pinned_versions import find_folders_for_job
from tasks.registry.version_signatures import EXPORTS as FOLDER
from tasks.registry.version_signatures import verify_tags
from tasks.registry.versions import EXPORTS_TAG, need_model, need_version, read_tag
from tasks.tracking.connection import connect, mlflow_errors
from training import task_types
from training.evaluation.scores import ComparedExport
from training.evaluation.stored_calibration import FILE as CALIBRATION
from training.evaluation.stored_calibration import Calibration
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, TaskSettings
from training.models.repository_files import part_of, require_no_other_files
from training.models.weights import WEIGHTS
from training.problems import UserError
from training.recipe.tables.exports import EXPORTS, ExportFormat, missing_packages

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


PROGRAM = "tasks.registry.version_exports"
STALL_TIMEOUT_S = 1800.0


def released_exports(refs: Mapping[str, Artifact]) -> dict[str, ComparedExport]:
    """The released exports by format, from the artifacts of a run by stage."""
    found = refs["compare_exports"].result if "compare_exports" in refs else {}
    return {name: one for name, one in found.items() if one.released}


def read_calibration(refs: Mapping[str, Artifact]) -> Calibration | None:
    """The calibration of a run, from its artifacts by stage; None without one."""
    return Calibration.read(refs["calibrate"].path) if "calibrate" in refs else None


def log_exports(
    client: MlflowClient, name: str, version: str, refs: Mapping[str, Artifact], exports: Mapping[str, ComparedExport]
) -> None:
    """Logs the released exports, with the calibration of their logits, to the version's MLflow run, and their
    comparisons as its tag, if it lacks them."""
    if not exports:
        return
    registered = client.get_model_version(name, version)
    text = describe_exports(exports)
    if registered.tags.get(EXPORTS_TAG, "{}") == text:
        return
    for path, file in _list_exports(refs, exports).items():
        client.log_artifact(registered.run_id, str(file), str(Path(path).parent))
    client.set_model_version_tag(name, version, EXPORTS_TAG, text)


def describe_exports(exports: Mapping[str, ComparedExport]) -> str:
    """The value of EXPORTS_TAG: the comparisons of released exports."""
    return json.dumps(to_jsonable_python(exports), sort_keys=True)


def _list_exports(refs: Mapping[str, Artifact], exports: Mapping[str, ComparedExport]) -> dict[str, Path]:
    """The files of released exports by their path in the version's MLflow run."""
    found = {}
    for export in exports:
        for file in EXPORTS[export].files_in(refs["export"].path):
            found[(Path(FOLDER) / Path(EXPORTS[export].file).parent / file.name).as_posix()] = file
    if exports and "calibrate" in refs:
        found[f"{FOLDER}/{CALIBRATION}"] = refs["calibrate"].path / CALIBRATION
    return found


def digest_exports(refs: Mapping[str, Artifact], exports: Mapping[str, ComparedExport]) -> dict[str, str]:
    """The sha256 of the files of released exports by their path in the version's MLflow run."""
    files = _list_exports(refs, exports)
    return dict(zip(files, Digests(home()).of_many([*files.values()]), strict=True))


def export_version(model: ModelSpec, name: str, out: Path) -> Any:
    """Writes a registered version to the new or empty folder `out`, which appears whole: in one of the formats, or with
    `safetensors` as it is stored. Returns the comparison of an export that was released with the version; None for one
    that is made now.

    Raises UserError if the model has no such export or a package is missing; MlflowFailed if MLflow does not answer.
    """
    version = _find_version(model)
    released = _released(version).get(name)
    if name in EXPORTS and released is None:
        _require_export(name, task_types.class_of(model.task["task"]).auto_class)
    with in_use(), find_folders_for_job("export", model.pinned) as (work, folders):
        if released:
            folders["released"] = _download_released(version, EXPORTS[name], work.job / "released")
        settings = ExportVersionSettings(
            export=name, max_length=model.max_length, calibration=model.calibration, **model.task
        )
        inputs = {part: str(folder) for part, folder in folders.items()}
        Job(program=PROGRAM, key=work.key, settings=settings.model_dump(), inputs=inputs).write(work.job)
        require_finished(run_job(work.job, python_argv(PROGRAM), env={}, stall_timeout_s=STALL_TIMEOUT_S))
        aside = out.absolute().with_name(f".{out.absolute().name}-{work.key}")
        shutil.copytree(work.job / OUTPUT, aside)
        aside.rename(out.absolute())
    return released.model_dump(mode="json") if released else None


def find_released(model: ModelSpec) -> dict[str, ComparedExport]:
    """The exports that were released with a version, by format. Raises MlflowFailed if MLflow does not answer."""
    return _released(_find_version(model))


def _find_version(model: ModelSpec) -> ModelVersion:
    with mlflow_errors():
        client = connect()
        return need_version(client, need_model(client, model.name), version=model.version)


def _released(version: ModelVersion) -> dict[str, ComparedExport]:
    return read_tag(version, EXPORTS_TAG, dict[str, ComparedExport], "{}")


def _download_released(version: ModelVersion, form: ExportFormat, out: Path) -> Path:
    """Downloads a released export from the version's MLflow run. Raises UserError if it is not the signed one."""
    place, run_id, signed = Path(form.file).parent, str(version.run_id), verify_tags(version)
    with mlflow_errors():
        from mlflow.artifacts import download_artifacts

        (out / place).mkdir(parents=True, exist_ok=True)
        for file in connect().list_artifacts(run_id, f"{FOLDER}/{place}"):
            if form.is_folder or Path(file.path).name.startswith(Path(form.file).name):
                fetched = download_artifacts(
                    run_id=run_id, artifact_path=file.path, dst_path=str(out / place), tracking_uri=tracking_uri()
                )
                if signed is not None:
                    signed.require_export(file.path, Path(fetched))
    return out


def _require_export(name: str, auto_class: str) -> None:
    if auto_class not in (classes := EXPORTS[name].classes):
        fitting = [one for one, form in EXPORTS.items() if auto_class in form.classes]
        message = f"{name!r} is for models of {', '.join(classes)}, and this is one of {auto_class}: choose "
        raise UserError.of("option", "FORMAT", f"{message}{', '.join([*fitting, 'safetensors'])}.")
    for command, packages in missing_packages([name]).items():
        message = f"{name!r} needs {', '.join(packages)}, not installed here: install the extra, `{command}`."
        raise UserError.of("option", "FORMAT", message)


class ExportVersionSettings(TaskSettings):
    """Settings of this program."""

    export: str
    """A format, or `safetensors`."""
    max_length: int
    """Tokens of a row."""
    calibration: Calibration | None = None


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Writes config.json, the tokenizer's files, those that the task type publishes, calibration.json of a calibrated
    version, and either the file of the format or model.safetensors.

    Inputs: model, tokenizer, and `released` with the files of the format, if it was released with the version.
    """
    values, out = ExportVersionSettings.model_validate(job.settings), job_dir / OUTPUT
    task_type = task_types.load(values.task, values.options)
    weights, tokenizer = Path(job.inputs["model"]), Path(job.inputs["tokenizer"])
    require_no_other_files(weights, tokenizer)
    for folder in (tokenizer, weights):  # where both have a file, that of the model counts
        for file in sorted(folder.iterdir()):
            if part_of(file.name) and ".safetensors" not in file.name:  # no pickles, and nothing that is not checked
                shutil.copyfile(file, out / file.name)
    if values.calibration:
        values.calibration.write(out)
    if values.export not in EXPORTS:
        merge_shards(weights, out / WEIGHTS)
    else:
        form, made = EXPORTS[values.export], Path(job.inputs.get("released", job_dir / "made"))
        if "released" not in job.inputs:
            module = importlib.import_module(f"training.models.{form.module}")
            module.export(task_type.auto_class, _join(weights, tokenizer, job_dir), [values.export], made)
        # A model of its own takes the place of the folder's.
        shutil.copytree(made / Path(form.file).parent if form.is_folder else made, out, dirs_exist_ok=True)
    for name, text in task_type.published_files(weights, values.max_length).items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    return {}


def _join(weights: Path, tokenizer: Path, job_dir: Path) -> Path:
    """A folder with links to the files of the model and of its tokenizer, as a training leaves it."""
    if weights == tokenizer:
        return weights
    joined = job_dir / "joined"
    joined.mkdir()
    for folder in (weights, tokenizer):
        for file in sorted(folder.iterdir()):
            if part_of(file.name) and not (joined / file.name).exists():
                (joined / file.name).symlink_to(file)
    return joined


def merge_shards(folder: Path, file: Path) -> None:
    """Writes all weights of a folder as one safetensors file, as most converters and servers read them."""
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        shutil.copyfile(shards[0], file)
        return
    from safetensors.torch import load_file, save_file

    save_file({name: tensor for shard in shards for name, tensor in load_file(shard).items()}, file, {"format": "pt"})


if __name__ == "__main__":
    run_program(main)
