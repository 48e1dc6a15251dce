"""The programs that predict and observe rows, on a machine whose memory holds 16 rows."""

from __future__ import annotations

from typing import Any

from training.jobs.program import run_program
from training.programs import observe, predict_shards


def main(job_dir: Any, job: Any, events: Any) -> dict[str, Any]:
    settings = job.settings
    if settings["batch_size"] / settings["micro_batch_divisor"] > 16:
        events.write("predicted", done=0)
        raise MemoryError("out of memory")
    program = predict_shards if "shards" in settings else observe
    return program.main(job_dir, job, events)


if __name__ == "__main__":
    run_program(main)
