"""A program that sleeps until it is stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from training.jobs.program import run_program
from training.jobs.protocol import Events, Job


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    events.progress(done=0, total=1)
    time.sleep(120)
    return {}


if __name__ == "__main__":
    run_program(main)
