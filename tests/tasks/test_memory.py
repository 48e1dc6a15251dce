"""Training that does not fit into memory goes on in smaller passes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.cache.stage import Work
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.child import run_child
from tests.training import tiny
from training.jobs.protocol import Job

# 64 rows need more than 480 MiB for this model's wide layers, 32 rows some 330.
WIDE = {"intermediate_size": 16384}
ROOM_MIB = 440
PROGRAM = f"""
import importlib.util, re, resource
from pathlib import Path
from training.programs import fit
from training.jobs.program import run_program

def main(job_dir, job, events):
    # What they need is there before the limit: to compile a module takes memory, too.
    from training.batching import batches
    from training.engine import estimation, export, task_setup, throughput, trainer
    from training.evaluation import plots
    from training.evaluation.metrics import labels
    from training.models import loading
    from training.task_types import sequence_classification
    if importlib.util.find_spec("deepspeed"):
        import deepspeed  # accelerate does, where it can
    taken = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + {ROOM_MIB} * 2**20, resource.RLIM_INFINITY))
    return fit.main(job_dir, job, events)

run_program(main, stops_itself=True)
"""


def test_training_under_a_real_limit_goes_on_with_half_the_rows_and_as_many_steps(home: Path, tmp_path: Path) -> None:
    world = tiny.make_world(tmp_path / "world", **WIDE)
    job = Job.read(tiny.fit_job(world, tmp_path / "job", per_device_train_batch_size=64, num_train_epochs=1))
    (tmp_path / "program.py").write_text(PROGRAM)
    said: list[dict[str, Any]] = []
    work = Work("k" * 40, tmp_path / "out", "run")
    work.on_events = said.extend  # type: ignore[method-assign]
    work.out.mkdir()
    fits = BatchDivision(64, world / "base/model")
    figures = run_child(
        work,
        "training.programs.fit",
        [sys.executable, str(tmp_path / "program.py")],
        settings=job.settings,
        inputs={name: Path(path) for name, path in job.inputs.items()},
        env={"OMP_NUM_THREADS": "1"},
        batches=fits,
    )
    assert (figures["micro_batch_size"], figures["steps"]) == (32, 3)  # 150 rows, 64 a step
    assert json.loads((work.job / "job.json").read_text())["settings"]["micro_batch_divisor"] == 2
    warnings = [event["message"] for event in said if event["kind"] == "warning"]
    would_fit = re.search(r"for 64 rows at a time.* training.per_device_train_batch_size (\d+) would fit", warnings[0])
    assert would_fit is not None and 1 <= int(would_fit[1]) < 64
    assert warnings[1].endswith("Continuing with at most 32 rows at a time.")
    assert figures["estimated_memory_mb"] == pytest.approx(figures["peak_memory_mb"], rel=0.3)
    assert BatchDivision(64, world / "base/model").rows == 32
