"""Where jobs run: start, poll, stop, logs. This engine is the machine itself, through training.jobs.supervise.

A handle is plain JSON, so whoever holds it may be another process than the one that started the job
(on Linux; elsewhere only the starter can poll or stop it). Another engine, a cluster's scheduler, would offer
the same four functions. `run_job` follows a job to its end over them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from tasks.cache.refs import Lock
from tasks.jobs.child_environment import added_environment, cores, environment
from tasks.jobs.hardware import killed_for_memory, visible_gpus
from training.jobs.processes import LINUX, send, start_ticks
from training.jobs.protocol import (
    EVENTS,
    LOGS,
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

STOP_GRACE_S = 20.0
"""What training may take to save a checkpoint; below the 30 s after which Prefect kills a cancelled run."""
STALLED_GRACE_S = 5.0
SHOWN_LOG_LINES = 20
LAUNCH = "launch.json"
"""In a job's folder: how its program was started."""

# The other ends of the supervisors' standard inputs: they close when this process ends, however it ends.
_started: dict[int, subprocess.Popen[bytes]] = {}


class Handle(BaseModel):
    """One started job, wherever it is asked about."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str
    """The job's directory, absolute."""
    pid: int
    """Its supervisor."""
    started: int
    """When the supervisor started, in clock ticks since boot: a pid alone is used again."""


class JobFailed(Exception):
    """A job ended without its result, and not by the user's mistake."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)

    def __reduce__(self) -> tuple[type[JobFailed], tuple[Failure]]:
        # Exception's own pickling would hand the message back to __init__.
        return type(self), (self.failure,)


class Launch(NamedTuple):
    """How a job's program is started."""

    argv: list[str]
    """The command; the job's directory is to follow."""
    env: dict[str, str]
    """What it is given beside the environment that every job has."""
    configuration: dict[str, Any]
    """What accelerate or DeepSpeed is given by the program itself, where anything."""

    def described(self, job: Path) -> dict[str, Any]:
        """All of it, plain JSON."""
        env = dict(sorted(added_environment(self.env).items()))
        return {"argv": [*self.argv, str(job)], "environment": env, "configuration": self.configuration}

    def keep(self, job: Path) -> None:
        """Writes it into the job's folder."""
        write_atomically(job / LAUNCH, json.dumps(self.described(job), indent=1).encode())


def require_finished(outcome: Outcome) -> Outcome:
    """The outcome itself when it is good; else raises UserError with the problems, or JobFailed."""
    if outcome.failure is None:
        return outcome
    if outcome.failure.kind == "user_error":
        raise UserError(outcome.failure.problems)
    raise JobFailed(outcome.failure)


@dataclass(frozen=True)
class Machines:
    """The machines that train together, as one of them sees them."""

    count: int = 1
    rank: int = 0
    """Which of them this one is."""
    rendezvous: str = ""
    """`host:port` of machine 0; empty for one machine."""

    @property
    def on_loopback(self) -> bool:
        """Whether all of them are this one, as in tests."""
        return self.rendezvous.startswith(("127.", "localhost:"))


ONE_MACHINE = Machines()


def accelerate_argv(
    program: str, *, num_processes: int, mixed_precision: str, use_cpu: bool, machines: Machines = ONE_MACHINE
) -> list[str]:
    """The command that runs a module under `accelerate launch`; the job's directory is to follow.

    `num_processes` are those of all machines together.

    Every value is given, and a configuration file of ours is named, so that nothing comes from the one that
    `accelerate config` may have left in the user's cache: that is read even when every value is given here.
    """
    argv = [sys.executable, "-m", "accelerate.commands.launch"]
    argv += ["--config_file", str(Path(__file__).with_name("accelerate.yaml"))]
    argv += ["--num_processes", str(num_processes), "--num_machines", str(machines.count)]
    argv += ["--mixed_precision", mixed_precision, "--dynamo_backend", "no"]
    if machines.count > 1:
        host, _, port = machines.rendezvous.rpartition(":")
        argv += ["--multi_gpu", "--machine_rank", str(machines.rank)]
        argv += ["--main_process_ip", host, "--main_process_port", port]
    elif num_processes > 1:
        # On a CPU too: given --cpu, accelerate starts one process and says nothing. Port 0 is one that is free.
        argv += ["--multi_gpu", "--main_process_port", "0"]
    elif use_cpu:
        argv += ["--cpu"]
    return [*argv, "-m", program]


def accelerate_environment(
    *, num_processes: int, use_cpu: bool, strategy: str = "ddp", machines: Machines = ONE_MACHINE
) -> dict[str, str]:
    """What the processes of such a command are given beside the environment that every job has."""
    here = num_processes // machines.count
    # One process that sees several GPUs would take them all, by torch's older DataParallel.
    env = {} if use_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[:here])}
    if num_processes == 1:
        return env
    env |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // here))}
    if use_cpu:
        # Of all strategies, accelerate knows only DDP on the CPU; for the others training makes up the state itself.
        env |= {"ACCELERATE_USE_CPU": "true"} if strategy == "ddp" else {}
        if LINUX and (machines.count == 1 or machines.on_loopback):
            env |= {"GLOO_SOCKET_IFNAME": "lo"}  # else whatever the host's name leads to
    return env


def predicting(program: str, lock: Lock) -> Launch:
    """How a program whose processes take batches of rows in turns is launched: by as many as train on this machine.

    Each has as many threads as one alone would have. Their number changes how sums are rounded, and what is predicted
    shall not hang on the number of processes.
    """
    here, use_cpu = lock.num_processes // lock.num_machines, not visible_gpus()
    argv = python_argv(program)  # one process needs no launcher, whose imports alone take seconds
    if here > 1:
        argv = accelerate_argv(program, num_processes=here, mixed_precision=lock.mixed_precision, use_cpu=use_cpu)
    env = accelerate_environment(num_processes=here, use_cpu=use_cpu)
    env.pop("OMP_NUM_THREADS", None)
    return Launch(argv, env, {})


def python_argv(program: str) -> list[str]:
    """The command that runs a module as a single process; the job's directory is to follow."""
    return [sys.executable, "-m", program]


def start(job: Path, argv: Sequence[str], env: Mapping[str, str], *, work: Path | None = None) -> Handle:
    """Start `argv` with the job's directory as its last argument, under a supervisor.

    `env` is added to this process's environment and wins over it; secrets travel here and never in argv. The
    job is stopped when this process ends. The supervisor's lock and logs are in the job's directory; given `work`,
    the directory of the job of another machine, `job` is for these alone.
    """
    job = job.resolve()
    (job / LOGS).mkdir(parents=True, exist_ok=True)
    for outcome in job.glob("outcome*.json"):
        outcome.unlink()  # of an earlier try; this one may be killed before it gets so far
    with open(job / LOGS / "supervisor.log", "ab") as log:
        supervisor = subprocess.Popen(
            [
                *python_argv("training.jobs.supervise"),
                "--grace-s",
                str(STOP_GRACE_S),
                str(job),
                "--",
                *argv,
                str(work or job),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment(env),
            start_new_session=True,
        )
    _started[supervisor.pid] = supervisor
    return Handle(job=str(job), pid=supervisor.pid, started=start_ticks(supervisor.pid))


def poll(handle: Handle) -> bool:
    """Whether the job still runs. False means that its supervisor is gone and all below it."""
    supervisor = _started.get(handle.pid)
    if supervisor is None:
        return start_ticks(handle.pid) == handle.started != 0
    if supervisor.poll() is None:
        return True
    _release(handle)
    return False


def stop(handle: Handle, grace_s: float) -> None:
    """Ask the job to stop, kill what is left of it after `grace_s`, and return when all is gone."""
    deadline = time.monotonic() + grace_s
    if poll(handle):
        send(handle.pid, signal.SIGTERM)
    while poll(handle) and time.monotonic() < deadline:
        time.sleep(0.05)
    if poll(handle):
        send(handle.pid, signal.SIGTERM)
    while poll(handle):
        time.sleep(0.05)


def logs(handle: Handle) -> Path:
    """What the job printed, in its newest try."""
    tries = (Path(handle.job) / LOGS).glob("[!r]*.log")  # those of rank 1 and on have files of their own
    return max(tries, key=lambda path: path.stat().st_mtime_ns)


def run_job(
    job: Path,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_events: Callable[[list[dict[str, Any]]], None],
    stall_timeout_s: float,
    poll_s: float = 0.2,
) -> Outcome:
    """Run the job to its end and give its outcome; a job that had finished before is not run again.

    `on_events` gets every event once, those of earlier tries first. A job that says nothing for
    `stall_timeout_s` is stopped. Any exception here, a cancellation or one of `on_events`, stops the job
    before it goes on its way.
    """
    follow = _Follower(job / EVENTS, on_events)
    earlier = finished_output(job)
    follow.read()
    if earlier is not None:
        return earlier
    tries_before, killed_before = follow.tries, killed_for_memory()
    handle = start(job, argv, env or {})
    stalled = False
    try:
        while poll(handle) and not stalled:
            time.sleep(poll_s)
            follow.read()
            stalled = follow.silent_s() > stall_timeout_s
    except BaseException:
        stop(handle, STOP_GRACE_S)
        raise
    if stalled:
        stop(handle, STALLED_GRACE_S)
    follow.read()
    if stalled:
        return _stalled(handle, stall_timeout_s)
    return _ended(handle, began=follow.tries > tries_before, short_of_memory=killed_for_memory() > killed_before)


def _ended(handle: Handle, *, began: bool, short_of_memory: bool) -> Outcome:
    reported = _reported(handle)
    # Where the system kills one of several for want of memory, the launcher stops the others.
    if reported is None or (short_of_memory and _kind(reported) == "interrupted"):
        return _unexplained(handle, began=began, short_of_memory=short_of_memory)
    return reported


def _reported(handle: Handle) -> Outcome | None:
    """The outcome that the job's programs reported; the loss of another process is not its cause."""
    outcome = read_outcome(Path(handle.job))
    return None if outcome is None or _kind(outcome) == "lost_rank" else outcome


def _stalled(handle: Handle, stall_timeout_s: float) -> Outcome:
    # A program that is stopped reports "interrupted"; anything else was reported before and is the cause.
    reported = _reported(handle)
    if reported is not None and _kind(reported) != "interrupted":
        return reported
    message = f"No sign of life for {stall_timeout_s:g} s (compute.stall_timeout_s), so the job was stopped."
    return _failed("stalled", message, handle)


def _kind(outcome: Outcome) -> str | None:
    return outcome.failure.kind if outcome.failure else None


class _Follower:
    """Delivers a job's events, each once, and measures the time since the last one."""

    def __init__(self, path: Path, on_events: Callable[[list[dict[str, Any]]], None]) -> None:
        self._path = path
        self._on_events = on_events
        self._offset = 0
        self._last = time.monotonic()
        self.tries = 0

    def read(self) -> None:
        events, self._offset = read_events(self._path, self._offset)
        if events:
            self._last = time.monotonic()
            self.tries += sum(event["kind"] == "started" for event in events)
            self._on_events(events)

    def silent_s(self) -> float:
        return time.monotonic() - self._last


def _unexplained(handle: Handle, *, began: bool, short_of_memory: bool) -> Outcome:
    """The failure of a job without an outcome. Its exit code is no help: accelerate's is always 1."""
    job = Path(handle.job)
    if full := full_disk(job):  # then no outcome could be written
        failure = Failure(kind="user_error", message=str(full), problems=full.problems)
        return Outcome(state="failed", failure=failure)
    if not began:
        return _failed("not_started", "The program ended before it began its work.", handle)
    if short_of_memory:
        return _failed("out_of_memory", "The system ran out of memory and killed the program.", handle)
    crashes = [file.read_text(errors="replace") for file in crash_files(job)]
    several = len(crashes) > 1
    for where in crashes:
        # Of several, one that lost another may abort.
        if where and not (several and "Aborted" in where):
            return _failed("internal", "The program crashed in native code.", handle, where)
    if several:
        message = "One of the processes was killed (the system does so, too, when memory runs out)."
        return _failed("lost_rank", message, handle)
    message = "The program was killed (the system does so, too, when memory runs out)."
    return _failed("interrupted", message, handle)


def _failed(kind: FailureKind, message: str, handle: Handle, where: str = "") -> Outcome:
    log = logs(handle)
    lines = last_lines(log, SHOWN_LOG_LINES)
    tail = "\n".join([message, f"The end of {log}:", *lines]) if lines else message
    return Outcome(state="failed", failure=Failure(kind=kind, message=tail, traceback=where))


def _release(handle: Handle) -> None:
    supervisor = _started.pop(handle.pid)
    if supervisor.stdin is not None:
        supervisor.stdin.close()
