"""The program that exports a trained model to other formats: `python -m training.programs.export_onnx JOB`.

inputs     model (the trained model's folder)
settings   ExportSettings, below
output     the file of each format, by its name in training.recipe.tables.exports
result     ExportResult, below
"""

from __future__ import annotations

from pathlib import Path

from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, Result, Settings


class ExportResult(Result):
    """The sizes of the exports."""

    bytes: dict[str, int]
    """By format."""


class ExportSettings(Settings):
    """The settings of a job of this program."""

    auto_class: str
    """The class of transformers that loads the model."""
    exports: list[str]
    """Formats."""


def main(job_dir: Path, job: Job, events: Events) -> ExportResult:
    """Writes all formats."""
    from training.models import onnx_files

    settings, folder = ExportSettings.model_validate(job.settings), Path(job.inputs["model"])
    files = onnx_files.export(settings.auto_class, folder, settings.exports, job_dir / OUTPUT)
    return ExportResult(bytes={name: onnx_files.size_of(file) for name, file in files.items()})


if __name__ == "__main__":
    run_program(main)
