"""Starts and imports of a first run: all that `finetune run` takes in a new home besides the work of its stages.

A cold run is the command in a new process and a new home: Python's start, the imports of all processes, Prefect's
server, the home's databases. The files of the libraries are in the system's cache. Its time has these parts:

    before the first stage   from the command's start to the first stage's line on its output, less that stage's seconds
    a stage                  its seconds, less its work
    between the stages       from the first stage's line to the last one's, less the seconds of the stages
    after the last stage     from its line to the end of the process

The work of a stage is its seconds in a warm run, the median of several: the same recipe in another new home, by a
process that has run the recipe before and whose fork server has imported all modules of all programs. There, fit too
is a fork of the fork server, without a launcher, so its work is loading the model and the rows, training and
exporting. The comparison does not depend on how and when a run starts its programs. All runs must train the same
weights.
"""

from __future__ import annotations

import json
import pkgutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tasks.registry
import training
from flows.cli.main import main
from tasks import servers
from tasks.jobs import fork_client
from tasks.jobs.commands import accelerate_environment, python_argv
from tasks.reports.stage_summaries import STAGES
from tasks.services.prefect_server import ensure_prefect_server
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.flows.small import command, environment, write_project
from training.jobs.processes import descendants

ROUNDS = 3
BUDGET_S = 10.0
TIMEOUT_S = 300.0
LIBRARIES = (
    *("tests.training.warm", "torch.profiler._cupti_monitor", "torch.utils.serialization.config", "mlflow.pyfunc"),
    *("mlflow.store.tracking.sqlalchemy_store", "mlflow.store.model_registry.sqlalchemy_store"),
)
NAME = "starts and imports of a first run"


@dataclass(frozen=True)
class ColdRun:
    """The times of a cold run, in seconds."""

    wall_s: float
    before_s: float
    after_s: float
    stages_s: dict[str, float]
    weights: str
    """SHA-256 of the trained weights."""

    @property
    def between_s(self) -> float:
        """The time between the first stage and the last that belongs to no stage."""
        return self.wall_s - self.before_s - self.after_s - sum(self.stages_s.values())

    def sum_s(self, work_s: Mapping[str, float]) -> float:
        """The sum of the parts."""
        return self.wall_s - sum(work_s.values())

    def parts(self, work_s: Mapping[str, float]) -> dict[str, float]:
        """The time besides the work, by part of the run."""
        stages = {name: seconds - work_s[name] for name, seconds in self.stages_s.items()}
        ends = {"between the stages": self.between_s, "after the last stage": self.after_s}
        return {"before the first stage": self.before_s, **stages, **ends}


def measure(subject: Subject) -> list[Row]:
    """The parts of the cold run whose sum is the median of several, this sum, and the peak memory of one more."""
    folder = subject.folder / "cold"
    file = write_project(folder / "project")
    work_s, weights = _measure_work(file, folder)
    runs = [_run_cold(file, folder / f"cold-{number}") for number in range(ROUNDS)]
    if {run.weights for run in runs} != {weights}:
        raise RuntimeError("the cold runs and the warm run trained different weights")
    how = "of all processes of a run, sum of PSS from /proc, read 5 times a second"
    return [*build_rows(runs, work_s), Row("peak memory", _measure_peak(file, folder / "peak"), how, unit="MB")]


def build_rows(runs: Sequence[ColdRun], work_s: Mapping[str, float]) -> list[Row]:
    """The sum and the parts of the run whose sum is the median."""
    by_sum = sorted(runs, key=lambda run: run.sum_s(work_s))
    run, sums_s = by_sum[len(runs) // 2], [run.sum_s(work_s) for run in by_sum]
    how = (
        f"`finetune run` in a new home, {run.wall_s:.1f} s, less {sum(work_s.values()):.1f} s of work; "
        f"median of {len(runs)}, {sums_s[0]:.1f} to {sums_s[-1]:.1f} s"
    )
    rows = [Row(NAME, run.sum_s(work_s), how, unit="s", most=BUDGET_S)]
    for part, seconds in run.parts(work_s).items():
        stage = f"the stage takes {run.stages_s[part]:.2f} s, its work {work_s[part]:.2f} s" if part in work_s else ""
        rows.append(Row(f"… {part}", seconds, stage, unit="s"))
    return rows


def _measure_work(file: Path, folder: Path) -> tuple[dict[str, float], str]:
    """The seconds of the stages in a warm run, and the SHA-256 of its weights."""
    server = {"PREFECT_API_URL": ensure_prefect_server(), "PREFECT_API_AUTH_STRING": servers.auth_string()}
    argv = [sys.executable, "-m", "tests.benchmarks.cold", str(file), str(folder)]
    # By default a folder of the home: a fork server starts no program for another home.
    env = environment(folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "compiled"), **server)
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if ran.returncode != 0:
        raise RuntimeError(ran.stdout + ran.stderr)
    runs = [_read_result(folder / f"warm-{number}.json") for number in range(1, 1 + ROUNDS)]
    (weights,) = {weights for _, weights in runs}
    return {name: statistics.median(stages_s[name] for stages_s, _ in runs) for name in runs[0][0]}, weights


def _run_cold(file: Path, home: Path) -> ColdRun:
    out, lines_at = home.with_suffix(".json"), list[float]()
    began = time.monotonic()
    argv = command("run", str(file), "--json", str(out))
    with subprocess.Popen(argv, env=environment(home), stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("  ") and line.split()[0] in STAGES:
                lines_at.append(time.monotonic())
    wall_s = time.monotonic() - began
    stages_s, weights = _read_result(out)
    if len(lines_at) != len(stages_s):
        raise RuntimeError(f"{len(lines_at)} stages on the output, {len(stages_s)} in the result")
    before_s = lines_at[0] - began - next(iter(stages_s.values()))
    return ColdRun(wall_s, before_s, began + wall_s - lines_at[-1], stages_s, weights)


def _measure_peak(file: Path, home: Path) -> float:
    """The most memory of a run, in MB. Memory that processes share counts once."""
    peak_kb, output = 0, subprocess.DEVNULL
    argv = command("run", str(file))
    with subprocess.Popen(argv, env=environment(home), stdout=output, stderr=output) as run:
        while run.poll() is None:
            peak_kb = max(peak_kb, sum(map(read_pss_kb, [run.pid, *descendants(run.pid)])))
            time.sleep(0.2)
    if run.returncode != 0:
        raise RuntimeError(f"the run ended with exit code {run.returncode}")
    return peak_kb * 1024 / 1e6


def read_pss_kb(pid: int) -> int:
    """The memory of a process, in which each page is divided by the number of its processes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _read_result(out: Path) -> tuple[dict[str, float], str]:
    """The seconds of the stages, and the SHA-256 of the trained weights."""
    result: dict[str, Any] = json.loads(out.read_text())
    if result["state"] != "completed":
        raise RuntimeError(str(result["problems"]))
    return {stage["name"]: stage["seconds"] for stage in result["stages"]}, result["model"]["sha256"]


def _run_warm(file: Path, folder: Path) -> int:
    """Runs the recipe once, and then the warm runs, each in a new home, with all programs as forks of the fork server.
    Returns the exit code."""
    fit = {
        "accelerate_argv": lambda program, **_: python_argv(program),
        "accelerate_environment": lambda use_cpu, **others: (
            accelerate_environment(use_cpu=use_cpu, **others) | {"ACCELERATE_USE_CPU": str(use_cpu)}  # the launcher's
        ),
    }
    modules = (*fork_client.MODULES, *_modules())
    with (
        patch.multiple("tasks.stages.fit", **fit),
        patch.object(fork_client, "MODULES", modules),
        patch.object(fork_client.ForkServer, "fork", _fork(fork_client.ForkServer.fork)),
        fork_client.forked_programs(),
    ):
        for number in range(1 + ROUNDS):
            home = folder / f"warm-{number}"
            code = main(["run", str(file), "--quiet", "--home", str(home), "--json", f"{home}.json"])
            if code != 0:
                return code
    return 0


def _fork(fork: Callable[..., int]) -> Callable[..., int]:
    """As `fork`, but an error in place of a program that has to be a process of its own."""

    def fork_or_raise(server: fork_client.ForkServer, request: Mapping[str, Any], *others: Any) -> int:
        pid = fork(server, request, *others)
        if pid == 0:
            raise RuntimeError(f"{request['argv'][2]} is no fork: its environment or a module has changed")
        return pid

    return fork_or_raise


def _modules() -> list[str]:
    """All modules of the programs, and the libraries that these import when they have read their settings."""
    packages = (training, tasks.registry)
    found = (pkgutil.walk_packages(package.__path__, f"{package.__name__}.") for package in packages)
    names = [module.name for modules in found for module in modules]
    if find_spec("llama_cpp") is None:  # an extra that the tests do not install
        names.remove("training.models.llama_cpp_model")
    return [*names, *LIBRARIES]


if __name__ == "__main__":
    sys.exit(_run_warm(Path(sys.argv[1]), Path(sys.argv[2])))
