"""Launching jobs: the commands, and `run_job`, which follows a job to its end on an engine (tasks/jobs/engines)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks.cache.refs import Lock
from tasks.jobs.child_environment import added_environment, cores
from tasks.jobs.engines import Engine, local
from tasks.jobs.hardware import killed_for_memory, visible_gpus
from tasks.jobs.supervisors import STOP_GRACE_S
from training.jobs.protocol import (
    EVENTS,
    Failure,
    FailureKind,
    Outcome,
    crash_files,
    finished_output,
    last_lines,
    read_events,
    read_outcome,
    write_atomically,
)
from training.problems import UserError, full_disk
from training.recipe.tables.strategies import STRATEGIES

STALLED_GRACE_S = 5.0
LOG_LINES = 20
"""The end of the log that a failure's message shows."""
GROUP_OF_ONE = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}
"""The variables of a single process that joins a process group, which FSDP and DeepSpeed need. Port 0 is any free
port."""
LAUNCH = "launch.json"
"""In a job's folder: how its program was started."""


class JobFailed(Exception):
    """A job ended without its result, and not because of the user's mistake."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)

    def __reduce__(self) -> tuple[type[JobFailed], tuple[Failure]]:
        # Exception's own pickling would pass the message to __init__.
        return type(self), (self.failure,)


class Launch(NamedTuple):
    """How a job's program is started."""

    argv: list[str]
    """The command without its last argument, the job's folder."""
    env: dict[str, str]
    """Variables besides those of all jobs."""
    configuration: dict[str, Any]
    """The configuration that the program passes to accelerate or DeepSpeed."""

    def as_json(self, job: Path) -> dict[str, Any]:
        """The complete command, variables and configuration as plain JSON."""
        env = dict(sorted(added_environment(self.env).items()))
        return {"argv": [*self.argv, str(job)], "environment": env, "configuration": self.configuration}

    def write(self, job: Path) -> None:
        """Writes launch.json into the job's folder."""
        write_atomically(job / LAUNCH, json.dumps(self.as_json(job), indent=1).encode())


def require_finished(outcome: Outcome) -> Outcome:
    """The outcome of a finished job. Raises UserError with the problems, or JobFailed."""
    if outcome.failure is None:
        return outcome
    if outcome.failure.kind == "user_error":
        raise UserError(outcome.failure.problems)
    raise JobFailed(outcome.failure)


@dataclass(frozen=True)
class Machines:
    """The machines that train together, and the place of this one."""

    count: int = 1
    rank: int = 0
    """This machine's number."""
    rendezvous: str = ""
    """`host:port` of machine 0; empty for one machine."""

    @property
    def on_loopback(self) -> bool:
        """Whether all of them are this machine, as in tests."""
        return self.rendezvous.startswith(("127.", "localhost:"))


def accelerate_argv(
    program: str, *, num_processes: int, mixed_precision: str, use_cpu: bool, machines: Machines = Machines()
) -> list[str]:
    """The command, without the job's folder, that runs a module under `accelerate launch` with this number of processes
    on all machines together."""
    argv = [sys.executable, "-m", "accelerate.commands.launch"]
    # A file of ours: otherwise accelerate reads the one of `accelerate config`, even if all values are given here.
    argv += ["--config_file", str(Path(__file__).with_name("accelerate.yaml"))]
    argv += ["--num_processes", str(num_processes), "--num_machines", str(machines.count)]
    argv += ["--mixed_precision", mixed_precision, "--dynamo_backend", "no"]
    if machines.count > 1:
        host, _, port = machines.rendezvous.rpartition(":")
        argv += ["--multi_gpu", "--machine_rank", str(machines.rank)]
        argv += ["--main_process_ip", host, "--main_process_port", port]
    elif num_processes > 1:
        # On CPUs too: with --cpu, accelerate silently starts one process. Port 0 is any free port.
        argv += ["--multi_gpu", "--main_process_port", "0"]
    elif use_cpu:
        argv += ["--cpu"]
    return [*argv, "-m", program]


def accelerate_environment(
    *, num_processes: int, use_cpu: bool, strategy: str = "ddp", machines: Machines = Machines()
) -> dict[str, str]:
    """The variables of the processes of `accelerate_argv`, besides those of all jobs."""
    here = num_processes // machines.count
    # A single process that sees several GPUs would use all of them, by torch's old DataParallel.
    env = {} if use_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[:here])}
    if num_processes == 1:
        return env if STRATEGIES[strategy].replicates else env | GROUP_OF_ONE
    env |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // here))}
    if use_cpu:
        # On CPUs accelerate supports only DDP; for the other strategies, training builds accelerate's state itself.
        env |= {"ACCELERATE_USE_CPU": "true"} if strategy == "ddp" else {}
        if machines.count == 1 or machines.on_loopback:
            env |= {"GLOO_SOCKET_IFNAME": "lo"}  # by default, the interface that the host's name resolves to
    return env


def build_predict_launch(program: str, lock: Lock) -> Launch:
    """The launch of a program whose processes share the batches of rows: as many processes as train on this machine.

    Each has as many threads as a single process would have. The number of threads changes how sums are rounded, and
    predictions must not depend on the number of processes.
    """
    here, use_cpu = lock.num_processes // lock.num_machines, not visible_gpus()
    argv = python_argv(program)  # importing the launcher takes seconds, and one process does not need it
    if here > 1:
        argv = accelerate_argv(program, num_processes=here, mixed_precision=lock.mixed_precision, use_cpu=use_cpu)
    env = accelerate_environment(num_processes=here, use_cpu=use_cpu)
    env.pop("OMP_NUM_THREADS", None)
    return Launch(argv, env, {})


def python_argv(program: str) -> list[str]:
    """The command, without the job's folder, that runs a module as a single process."""
    return [sys.executable, "-m", program]


class EventReader:
    """Reads the events of a job, of all its tries, and passes each on once."""

    def __init__(self, path: Path, on_events: Callable[[list[dict[str, Any]]], None]) -> None:
        self._path = path
        self._on_events = on_events
        self._offset = 0
        self.starts = 0
        """How often the program has started."""

    def read(self) -> bool:
        """Passes new events on; returns whether there were any."""
        events, self._offset = read_events(self._path, self._offset)
        if events:
            self.starts += sum(event["kind"] == "started" for event in events)
            self._on_events(events)
        return bool(events)


def run_job(
    job: Path,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_events: Callable[[list[dict[str, Any]]], None] = lambda events: None,
    events: EventReader | None = None,
    stall_timeout_s: float,
    poll_s: float = 0.2,
    engine: Engine[Any] = local,
) -> Outcome:
    """Runs the job to its end on an engine and returns its outcome; a job that has finished before is not run again.

    `on_events` gets every event once, those of earlier tries first; a caller that runs the job again passes `events`
    instead. A job without new events for `stall_timeout_s` is stopped. Any exception, such as a cancellation or an
    error of `on_events`, stops the job before it is raised.
    """
    events = events or EventReader(job / EVENTS, on_events)
    events.read()
    if (earlier := finished_output(job)) is not None:
        return earlier
    starts_before, killed_before = events.starts, killed_for_memory()
    handle, stalled, last_event = engine.start(job, argv, env or {}), False, time.monotonic()
    try:
        while engine.poll(handle) and not stalled:
            engine.wait(handle, poll_s)
            if events.read():
                last_event = time.monotonic()
            stalled = time.monotonic() - last_event > stall_timeout_s
    except BaseException:
        engine.stop(handle, STOP_GRACE_S)
        raise
    if stalled:
        engine.stop(handle, STALLED_GRACE_S)
    events.read()
    reported = read_outcome(job)
    kind = reported.failure.kind if reported and reported.failure else None
    killed_by_system = killed_for_memory() > killed_before
    # These failures are consequences: a process that lost another one, or that this function or the launcher stopped.
    consequences = {"lost_rank", *(["interrupted"] if stalled or killed_by_system else [])}
    if reported is not None and kind not in consequences:
        return reported
    if stalled:
        message = f"No sign of life for {stall_timeout_s:g} s (compute.stall_timeout_s), so the job was stopped."
        return _build_failure("stalled", message, engine.logs(handle))
    return _explain_end(
        job, engine.logs(handle), began=events.starts > starts_before, killed_by_system=killed_by_system
    )


def _explain_end(job: Path, log: Path, *, began: bool, killed_by_system: bool) -> Outcome:
    """The failure of a job without an outcome. Its exit code does not help: accelerate's is always 1."""
    if full := full_disk(job):  # no outcome could be written
        failure = Failure(kind="user_error", message=str(full), problems=full.problems)
        return Outcome(state="failed", failure=failure)
    if not began:
        return _build_failure("not_started", "The program ended before it began its work.", log)
    if killed_by_system:
        return _build_failure("out_of_memory", "The system ran out of memory and killed the program.", log)
    crashes = [file.read_text(errors="replace") for file in crash_files(job)]
    several = len(crashes) > 1
    for traceback in crashes:
        # One of several processes may abort because it lost another.
        if traceback and not (several and "Aborted" in traceback):
            return _build_failure("internal", "The program crashed in native code.", log, traceback)
    killed = "One of the processes" if several else "The program"
    message = f"{killed} was killed (the system also does so when memory runs out)."
    return _build_failure("lost_rank" if several else "interrupted", message, log)


def _build_failure(kind: FailureKind, message: str, log: Path, traceback: str = "") -> Outcome:
    lines = last_lines(log, LOG_LINES)
    text = "\n".join([message, f"The end of {log}:", *lines]) if lines else message
    return Outcome(state="failed", failure=Failure(kind=kind, message=text, traceback=traceback))
