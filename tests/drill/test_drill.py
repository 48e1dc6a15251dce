"""The drill sees what it looks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drill import watch as watching
from tests.drill.compare import Left
from tests.drill.ground import MARK, Run
from tests.drill.kills import plan
from tests.drill.watch import Watch
from training.processes import SUPERVISOR


def asleep(number: int, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """A process of this drill's run of that number."""
    argv = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", *arguments]
    env = {**os.environ, MARK: f"{os.getpid()}-{number}", **environment}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_seed_always_draws_the_same_kills() -> None:
    assert plan(50, seed=3) == plan(50, seed=3) != plan(50, seed=4)
    assert {kill.part for kill in plan(50, seed=3)} == {"flow", "supervisor", "launcher", "rank"}
    assert max(kill.after for kill in plan(50, seed=3)) > 0.9


def test_a_process_that_outlives_its_run_is_told_of_and_ended_and_that_of_the_next_run_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "GONE_WITHIN_S", 0.0)
    survivor, following, watch = asleep(1), asleep(2), Watch()
    watch.condemn(Run(f"{os.getpid()}-1", tmp_path, tmp_path, survivor))
    watch.settle()
    (fault,) = watch.faults
    assert watch.left == 1 and f"process {survivor.pid} outlived its run" in fault
    assert survivor.wait(5) == -9 and following.poll() is None
    following.kill()
    following.wait()


def test_two_writers_in_one_job_are_told_of_and_two_of_one_supervisor_are_not(tmp_path: Path) -> None:
    job, watch = str(tmp_path / "jobs" / "k"), Watch()
    writers = [asleep(1, job, **{SUPERVISOR: "7:1"}) for _ in range(2)]
    watch.look()
    assert watch.faults == []
    writers.append(asleep(2, job, **{SUPERVISOR: "8:1"}))
    watch.look()
    (fault,) = watch.faults
    assert fault.startswith(f"two supervisors at once have processes in {job}")
    for writer in writers:
        writer.kill()
        writer.wait()


def test_whatever_differs_is_named() -> None:
    whole = Left("sha", "small/1", {"fit": ["key", "digest"]}, {"validation": {"f1": 1.0}}, {"loss": [(1, 0.5)]})
    assert whole.differences(Left(**vars(whole))) == []
    other = Left("other", "small/1", {"fit": ["key", "x"]}, {}, {"loss": [(1, 0.5), (1, 0.5)], "f1": []})
    assert [line.split(":")[0] for line in whole.differences(other)] == [
        "model",
        "artifacts.fit",
        "metrics.validation",
        "curve.loss",
        "curve.f1",
    ]
