"""The program that writes a registered version as a folder for other tools, from the server that MLFLOW_TRACKING_URI
names.

settings   tasks.registry.program_settings.ExportVersionSettings
output     config.json, the tokenizer's files, and either the file of the format or model.safetensors
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tasks.registry.predict_rows import fetch_model, find_parts
from tasks.registry.program_settings import ExportVersionSettings
from tasks.tracking.connection import mlflow_errors
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job
from training.models.repository_files import part_of
from training.recipe.tables.exports import EXPORTS

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

    from tasks.registry.exports import FOLDER

    with mlflow_errors():
        for file in MlflowClient().list_artifacts(run_id, f"{FOLDER}/{Path(name).parent}"):
            if Path(file.path).name.startswith(Path(name).name):
                place = out / Path(name).parent
                place.mkdir(exist_ok=True)
                download_artifacts(run_id=run_id, artifact_path=file.path, dst_path=str(place))


if __name__ == "__main__":
    run_program(main)
