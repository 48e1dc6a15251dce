"""The program that exports a trained model to other formats: `python -m training.programs.export_model JOB`.

inputs     model (the trained model's folder)
settings   ExportSettings, below
output     the files of each format, by their names in training.recipe.tables.exports
result     ExportResult, below
"""

from __future__ import annotations

import importlib
from pathlib import Path

from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, Result, Settings
from training.recipe.tables.exports import EXPORTS, by_module


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
    settings, folder, out = ExportSettings.model_validate(job.settings), Path(job.inputs["model"]), job_dir / OUTPUT
    for module, names in by_module(settings.exports).items():
        importlib.import_module(f"training.models.{module}").export(settings.auto_class, folder, names, out)
    return ExportResult(bytes={name: EXPORTS[name].size_in(out) for name in settings.exports})


if __name__ == "__main__":
    run_program(main)
