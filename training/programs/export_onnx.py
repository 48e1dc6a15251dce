"""The program that exports a trained model to other formats: `python -m training.programs.export_onnx JOB`.

inputs     model (the trained model's folder)
settings   ExportSettings, below
output     the file of each format, by its name in training.recipe.tables.exports
figures    bytes of each format
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, Settings


class ExportSettings(Settings):
    """The settings of a job of this program."""

    auto_class: str
    """The class of transformers that loads the model."""
    exports: list[str]
    """Formats."""


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Writes all formats. Returns the figures."""
    from training.models import onnx_files

    settings, folder = ExportSettings.model_validate(job.settings), Path(job.inputs["model"])
    files = onnx_files.export(settings.auto_class, folder, settings.exports, job_dir / OUTPUT)
    return {"bytes": {name: onnx_files.size_of(file) for name, file in files.items()}}


if __name__ == "__main__":
    run_program(main)
