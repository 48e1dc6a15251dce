"""A program that copies the files that its settings name: `python -m tests.tasks.jobs.copying JOB`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    for name in job.settings["files"]:
        shutil.copyfile(Path(job.inputs["rows"]) / name, job_dir / OUTPUT / name)
    return {"copied": len(job.settings["files"])}


if __name__ == "__main__":
    run_program(main)
