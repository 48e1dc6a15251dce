"""Training jobs run by forks of a process that has imported torch, which costs more than training.

A job of several ranks is as many forks, with the environment that a launcher would give them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tasks.jobs.commands import accelerate_environment
from tests.fork_server import Fork
from tests.servers import closed_port
from training.engine.state_check import BATCHES, SWITCH
from training.evaluation import plots
from training.jobs.program import run_program
from training.jobs.protocol import LOGS, Job, Outcome, read_events, read_outcome, sha256
from training.programs import fit

END_WITHIN_S = 120.0


def run_fit(job_dir: str, rank: dict[str, str]) -> None:
    os.environ |= {SWITCH: "1"} | rank
    plots.draw_curves = _draw_nothing
    sys.argv[1:] = [job_dir]
    with open(Path(job_dir) / "log.txt", "a") as sys.stderr:
        run_program(fit.main, stops_itself=True)


def _draw_nothing(events: object, file: Path) -> None:
    """In place of the plot of a training, which takes a quarter of the time of a small one."""
    file.parent.mkdir(parents=True)


def run_main(program: ModuleType) -> Callable[[str, dict[str, str]], None]:
    """A function that runs another program in a fork, by its module."""
    return partial(_run_main, program.__name__)


def _run_main(program: str, job_dir: str, rank: dict[str, str]) -> None:
    os.environ |= rank
    sys.argv[1:] = [job_dir]
    with open(Path(job_dir) / "log.txt", "a") as sys.stderr:
        run_program(importlib.import_module(program).main)


def start(
    job_dir: Path, launched: int | None = None, program: Callable[[str, dict[str, str]], None] = run_fit
) -> list[Fork]:
    """The job's ranks, started; `launched` of them where that is not the job's number of processes."""
    compute = Job.read(job_dir).settings.get("compute", {"num_processes": 1, "strategy": "ddp"})
    count = launched or compute["num_processes"]
    (job_dir / "logs").mkdir(exist_ok=True)
    processes = [Fork(program, (str(job_dir), rank)) for rank in ranks(count, compute)]
    for process in processes:
        process.start()
    return processes


def ranks(count: int, compute: dict[str, Any]) -> list[dict[str, str]]:
    """The environment of each rank of a job."""
    if count == 1:
        return [accelerate_environment(num_processes=1, use_cpu=True, strategy=compute["strategy"])]
    common = accelerate_environment(num_processes=count, use_cpu=True, strategy=compute["strategy"])
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed_port()), "WORLD_SIZE": str(count)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def finish(
    job_dir: Path, launched: int | None = None, program: Callable[[str, dict[str, str]], None] = run_fit
) -> Outcome:
    """How the job ended, after it has; the processes of one that failed must end by themselves."""
    wait_for_all(start(job_dir, launched, program), job_dir, time.monotonic() + END_WITHIN_S)
    outcome = read_outcome(job_dir)
    assert outcome is not None, "it died without an outcome"
    return outcome


def kill_when(job_dir: Path, reached: Callable[[], bool], number: int = signal.SIGKILL, victim: int = 0) -> bool:
    """Start the job and send the signal to one rank once `reached`; whether it was still running then."""
    processes = start(job_dir)
    deadline = time.monotonic() + END_WITHIN_S
    while processes[victim].is_alive() and not reached() and time.monotonic() < deadline:
        time.sleep(0.0005)
    alive = processes[victim].is_alive()
    if alive and time.monotonic() < deadline:
        os.kill(processes[victim].pid or 0, number)
        deadline = time.monotonic() + END_WITHIN_S
    wait_for_all(processes, job_dir, deadline)
    return alive


def wait_for_all(processes: list[Fork], job_dir: Path, deadline: float) -> None:
    """Waits for the ranks; those that hang, as ranks do that wait for each other, are killed and fail the test."""
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hanging:
        processes[rank].kill()
        processes[rank].join()
    assert not hanging, f"ranks {hanging} of {len(processes)} were still running after {END_WITHIN_S:g} s in {job_dir}"


def weights(job_dir: Path) -> str:
    return sha256(job_dir / "output/model/model.safetensors")


def events(job_dir: Path, task: str) -> list[dict[str, Any]]:
    file = job_dir / "events.jsonl"
    return [event for event in _events(file, file.stat().st_size if file.exists() else 0) if event["kind"] == task]


@lru_cache(maxsize=8)
def _events(file: Path, size: int) -> list[dict[str, Any]]:
    """All events of a file of this size. Cached: a waiting test reads the file every half millisecond."""
    return read_events(file, 0)[0]


def curve(*job_dirs: Path) -> dict[int, dict[str, float]]:
    """The figures of each step, from the folders of all machines of a job."""
    points: dict[int, dict[str, float]] = {}
    for event in (event for job_dir in job_dirs for event in events(job_dir, "metrics")):
        points.setdefault(event["step"], {}).update(event["values"])
    return points


def checkpoints_written(job_dir: Path) -> int:
    return len(events(job_dir, "checkpoint"))


def batches(*job_dirs: Path) -> dict[tuple[str, int, int], Any]:
    """The rows of each rank in each micro-batch of each step; a step that was trained again had the same rows."""
    found: dict[tuple[str, int, int], Any] = {}
    for file in sorted(file for job_dir in job_dirs for file in (job_dir / LOGS).glob(BATCHES.format("*"))):
        for line in map(json.loads, file.read_text().splitlines()):
            place = (file.name, line["step"], line["micro"])
            assert found.setdefault(place, line) == line, f"at {place}, {line} came in place of {found[place]}"
    return found


def within_a_step(job_dir: Path, least: int) -> bool:
    """Whether rank 0 is between two micro-batches of a step, after at least so many steps."""
    file = job_dir / LOGS / BATCHES.format(0)
    last = json.loads(file.read_text().splitlines()[-1]) if file.exists() and file.stat().st_size else {}
    return bool(last.get("step", -1) >= least and last["micro"] == 0)


def assert_same(job_dir: Path, undisturbed: Path, *other_machines: Path) -> None:
    """`job_dir` has the output; the folders of the job on other machines have a part of the logs."""
    assert batches(job_dir, *other_machines) == batches(undisturbed) != {}
    assert weights(job_dir) == weights(undisturbed)
    assert curve(job_dir, *other_machines) == curve(undisturbed)


def assert_resumes(job_dir: Path, undisturbed: Path, after: int, victim: int = 0) -> None:
    """The job is killed after so many checkpoints; the same job again ends with the bytes of the undisturbed one."""
    assert kill_when(job_dir, lambda: checkpoints_written(job_dir) >= after, victim=victim)
    assert finish(job_dir).state == "finished"
    assert_same(job_dir, undisturbed)


def assert_same_losses(one: Path, other: Path) -> None:
    """Both jobs have the losses of every step, but for the order in which they are summed."""
    ours, theirs = curve(one), curve(other)
    assert ours.keys() == theirs.keys()
    for step, values in ours.items():
        losses = {name: value for name, value in values.items() if "loss" in name}
        assert {name: theirs[step][name] for name in losses} == pytest.approx(losses, rel=1e-4, abs=1e-5), step
