"""The program that estimates a training: `python -m training.programs.estimate JOB`.

JOB is that of training.programs.fit.

result     the fields of training.engine.estimation.Estimate
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.engine.fit_settings import FitSettings
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Estimates the training."""
    from training.engine import estimation
    from training.engine.task_setup import make_task
    from training.models import loading

    loading.make_deterministic()
    return asdict(estimation.estimate(make_task(FitSettings.model_validate(job.settings), job.inputs, job_dir, events)))


if __name__ == "__main__":
    run_program(main)
