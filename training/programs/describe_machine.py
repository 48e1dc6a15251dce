"""The program that describes the hardware that a training would use here:
`python -m training.programs.describe_machine JOB`.

result     that of training.engine.training_environment.machine
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.engine.training_environment import machine
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Describes the machine."""
    return machine()


if __name__ == "__main__":
    run_program(main)
