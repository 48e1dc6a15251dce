"""The program that tokenizes as transformers does: `python -m training.programs.tokenize_with_transformers JOB`.

For tokenizers that exist only in Python, and for those whose class builds another tokenizer than tokenizer.json has.
The latter encode on all cores too; only the import of transformers takes seconds.

inputs     data (SPLIT.arrow), tokenizer and model (the folders of a snapshot)
settings   TokenizeSettings, below
output     the files of `training.tokenization.token_files.write_tokens`
result     training.tokenization.token_files.TokenizeResult
"""

from __future__ import annotations

from pathlib import Path

from training import task_types
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, TaskSettings
from training.recipe.tables.row_checks import Level
from training.tokenization.token_files import TokenizeResult, write_tokens
from training.tokenization.transformers_encoder import load_encoder


class TokenizeSettings(TaskSettings):
    """The settings of a job of this program."""

    max_length: int
    """Tokens a row."""
    level: Level
    """Severity of a truncated row."""
    vocab_size: int | None = None
    """The tokens that the model has, if known."""


def main(job_dir: Path, job: Job, events: Events) -> TokenizeResult:
    """Tokenizes every split."""
    events.progress(phase="tokenizer")
    settings = TokenizeSettings.model_validate(job.settings)
    encoder = load_encoder(Path(job.inputs["tokenizer"]), Path(job.inputs["model"]), settings.max_length)
    return write_tokens(
        task_types.load(settings.task, settings.options),
        Path(job.inputs["data"]),
        encoder,
        job_dir / OUTPUT,
        settings.level,
        lambda done, total: events.progress(done=done, total=total),
        settings.vocab_size,
    )


if __name__ == "__main__":
    run_program(main)
