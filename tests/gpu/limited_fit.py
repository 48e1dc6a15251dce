"""training.programs.fit with less GPU memory: `python -m tests.gpu.limited_fit JOB`, through `accelerate launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.jobs.program import run_program
from training.jobs.protocol import Events, Job
from training.programs import fit


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Trains after a limit was set, beyond which torch's allocator runs out of memory as it would at the GPU's end."""
    import torch

    from tests.gpu.memory import LIMIT_BYTES

    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT_BYTES / total))
    return fit.main(job_dir, job, events)


if __name__ == "__main__":
    run_program(main, stops_itself=True)
