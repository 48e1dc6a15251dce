"""Training that does not fit into memory goes on in smaller passes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.cache.stage import Work
from tasks.jobs.retries import BatchDivision, run_child
from tests.training import tiny
from training.jobs.protocol import Job

# Wide layers: rows take more memory than all else.
WIDE = {"intermediate_size": 16384}
# The first try limits itself to the memory that half of its rows need by its estimate; later ones have the same limit.
PROGRAM = """
import resource
from pathlib import Path
from training.engine import estimation
from training.jobs import resources
from training.jobs.program import run_program
from training.programs import fit

ROOM = Path(__file__).with_name("room")
report = estimation.report_estimate

def limit(task, job_dir):
    # What they need is there before the limit: to compile a module takes memory, too.
    from training.engine import throughput, trainer
    from training.evaluation import plots
    from training.evaluation.metrics import labels
    if not ROOM.exists():
        whole = estimation.estimate(task)
        half = 1e6 * (whole.memory_mb - whole.micro_batch_size / 2 * whole.memory_per_row_mb)
        ROOM.write_text(str(int(half) - resources.used_bytes()))
    most = resources.used_bytes("VmData") + int(ROOM.read_text())
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    report(task, job_dir)

estimation.report_estimate = limit
run_program(fit.main, stops_itself=True)
"""
# Each tensor is mapped by itself. In a heap, gaps between tensors would take up to 100 MB, other ones in each process.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


@pytest.mark.slow
def test_training_under_a_real_limit_goes_on_with_half_the_rows_and_as_many_steps(home: Path, tmp_path: Path) -> None:
    world = tiny.make_world(tmp_path / "world", **WIDE)
    job = Job.read(tiny.fit_job(world, tmp_path / "job", per_device_train_batch_size=64, num_train_epochs=1))
    (tmp_path / "program.py").write_text(PROGRAM)
    events: list[dict[str, Any]] = []
    work = Work("0" * 40, tmp_path / "out", "run")
    work.on_events = events.extend  # type: ignore[method-assign]
    work.out.mkdir()
    figures = run_child(
        work,
        "training.programs.fit",
        [sys.executable, str(tmp_path / "program.py")],
        settings=job.settings,
        inputs={name: Path(path) for name, path in job.inputs.items()},
        env=ENVIRONMENT,
        batches=BatchDivision(64, world / "base/model"),
    )
    warnings = [event["message"] for event in events if event["kind"] == "warning"]
    assert (figures["micro_batch_size"], figures["steps"]) == (32, 3), warnings  # 150 rows, 64 a step
    assert json.loads((work.job / "job.json").read_text())["settings"]["micro_batch_divisor"] == 2
    would_fit = re.search(r"for 64 rows at a time.* training.per_device_train_batch_size (\d+) would fit", warnings[0])
    assert would_fit is not None and 16 <= int(would_fit[1]) <= 48, warnings
    assert warnings[1].endswith("Continuing with at most 32 rows at a time."), warnings
    assert figures["estimated_memory_mb"] == pytest.approx(figures["peak_memory_mb"], rel=0.3)
    assert BatchDivision(64, world / "base/model").rows == 32
