"""The supervisors of jobs on this machine: start, poll, wait, stop.

A handle is plain JSON, so that another process can poll or stop a job on Linux.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from tasks.jobs import warm
from training.jobs.processes import send, start_ticks
from training.jobs.protocol import LOGS

STOP_GRACE_S = 20.0
"""For training to save a checkpoint; below the 30 s after which Prefect kills a cancelled run."""

# By pid, the other end of each supervisor's standard input, which closes when this process ends, however it ends.
_lifelines: dict[int, int] = {}


class Handle(BaseModel):
    """A started job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str
    """The job's folder, absolute."""
    pid: int
    """Of its supervisor."""
    started: int
    """When the supervisor started, in clock ticks since boot: Linux reuses process ids."""


def start_supervisor(job: Path, argv: Sequence[str], env: Mapping[str, str]) -> Handle:
    """Starts a command under a supervisor of the job's folder. The job stops when this process ends.

    `env`: the whole environment.
    """
    request = {"folder": str(job), "argv": [*argv], "env": dict(env), "grace_s": STOP_GRACE_S}
    with open(job / LOGS / "supervisor.log", "ab") as log:
        pid = _start(lambda stdin, lifeline: warm.fork(request, stdin, lifeline, log)) or _start(
            lambda stdin, _: _start_process(request, stdin, log)
        )
    return Handle(job=str(job), pid=pid, started=start_ticks(pid))


def _start(start: Callable[[int, int], int]) -> int:
    """Calls `start` with the two ends of a supervisor's standard input. Returns the supervisor's pid, or 0."""
    stdin, lifeline = os.pipe()
    pid = 0
    try:
        pid = start(stdin, lifeline)
    finally:
        os.close(stdin)
        if pid:
            _lifelines[pid] = lifeline
        else:
            os.close(lifeline)
    return pid


def _start_process(request: dict[str, Any], stdin: int, log: IO[bytes]) -> int:
    """Starts a supervisor as a process of its own and returns its pid."""
    command = [sys.executable, "-m", "training.jobs.supervise", "--grace-s", str(request["grace_s"])]
    supervisor = subprocess.Popen(
        [*command, request["folder"], "--", *request["argv"]],
        stdin=stdin,
        stdout=log,
        stderr=log,
        env=request["env"],
        start_new_session=True,
    )
    supervisor.returncode = 0  # `poll` reaps it
    return supervisor.pid


def pass_job(handle: Handle, job: Path) -> Handle | None:
    """Gives a job to a command that waits for it in the handle's folder. None if its supervisor has ended."""
    try:
        os.write(_lifelines[handle.pid], os.fsencode(job) + b"\n")
    except BrokenPipeError:
        return None
    return handle.model_copy(update={"job": str(job)})


def poll(handle: Handle) -> bool:
    """Whether the job still runs; False only after its supervisor and all processes below it have ended."""
    if start_ticks(handle.pid) == handle.started != 0:
        return True
    if lifeline := _lifelines.pop(handle.pid, None):
        os.close(lifeline)
        with contextlib.suppress(ChildProcessError):  # a fork is the warm process's child
            os.waitpid(handle.pid, 0)
    return False


def wait(handle: Handle, timeout_s: float) -> None:
    """Returns as soon as the job's supervisor ends, at the latest after `timeout_s`."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(handle.pid)
        try:
            ended = select.poll()
            ended.register(process, select.POLLIN)
            ended.poll(1000 * timeout_s)
        finally:
            os.close(process)


def stop(handle: Handle, grace_s: float) -> None:
    """Stops the job, kills its remaining processes after `grace_s`, and returns when all have ended."""
    deadline = time.monotonic() + grace_s
    if poll(handle):
        send(handle.pid, signal.SIGTERM)
    while poll(handle) and time.monotonic() < deadline:
        time.sleep(0.05)
    if poll(handle):
        send(handle.pid, signal.SIGTERM)  # at the second signal the supervisor kills
    while poll(handle):
        time.sleep(0.05)
