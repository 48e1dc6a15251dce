"""One training on several machines: machine 0 runs the flow, and the helpers run their processes of its training.

All machines see one home, under the same path, and communicate through it:

    <home>/machines/<host>-<port>/leader.json   written by machine 0: its run, the try of a job, the end of the run
                                  RUN.lock      held by the run of machine 0 until it ends
                                  machine1/     folder of machine 1's supervisor; `joined`: the try that it is in

A try begins when every machine has joined it, so that no process of an earlier try connects to processes of the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.cache import settings
from tasks.cache.locks import is_held
from tasks.cache.refs import Ref
from tasks.cache.stage import Listener, Row, Work
from tasks.jobs.engines.local import Handle, start, stop
from tasks.jobs.hardware import visible_gpus
from tasks.jobs.launch import JobFailed, Machines, accelerate_argv, accelerate_environment
from tasks.jobs.supervisors import STOP_GRACE_S
from training.jobs.protocol import Failure, Job, write_atomically
from training.problems import Problem, UserError
from training.recipe import Compute, ResolvedCompute

POLL_S = 0.2
LOST_GRACE_S = 1.0
"""For this machine's processes to end after machine 0's: without them no checkpoint can be saved."""
NOTE_AFTER_S = 5.0
"""How long machine 0 waits for the helpers before it prints a note."""


class LeaderState(BaseModel):
    """The state of machine 0, as the helpers see it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """Machine 0's flow run."""
    job: str | None = None
    """The key of the job to help with."""
    attempt: str | None = None
    """Identifies the try of the job."""
    ended: str | None = None
    """How the run, or its training, ended: completed, failed or interrupted."""
    message: str = ""
    """The model's folder, or the reason of the failure."""


def find_machines(compute: Compute) -> Machines:
    """The machines that train this recipe, from the recipe or else from the environment.

    Raises UserError if this machine's number, or the address of machine 0, is missing or wrong.
    """
    count = _read_number("num_machines", compute.num_machines, ("NNODES", "SLURM_NNODES"), 1)
    if count is None or count < 2:
        return Machines()
    rank = _read_number("machine_rank", compute.machine_rank, ("NODE_RANK", "SLURM_NODEID"), None)
    host, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    rendezvous = compute.rendezvous or (f"{host}:{port}" if host and port else None)
    problems = []
    if rank is None or rank >= count:
        message = f"is missing: number the {count} machines from 0 to {count - 1}, here or in NODE_RANK."
        if rank is not None:
            message = f"{rank} is out of range: there are {count} machines, 0 to {count - 1}."
        problems.append(Problem(kind="compute", where="compute.machine_rank", message=message))
    if rendezvous is None:
        message = "is missing: name host:port of machine 0, here or in MASTER_ADDR and MASTER_PORT."
        problems.append(Problem(kind="compute", where="compute.rendezvous", message=message))
    elif not rendezvous.rpartition(":")[2].isdecimal():
        message = f"{rendezvous!r} in MASTER_ADDR and MASTER_PORT is not host:port: set the field, or these variables."
        problems.append(Problem(kind="compute", where="compute.rendezvous", message=message))
    if problems or rank is None or rendezvous is None:
        raise UserError(problems)
    return Machines(count, rank, rendezvous)


def _read_number(field: str, written: int | str | None, names: tuple[str, ...], default: int | None) -> int | None:
    if isinstance(written, int):
        return written
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return default
    if not os.environ[name].isdecimal():
        message = f"{name}={os.environ[name]!r} in the environment is not a number: set the field, or {name}."
        raise UserError([Problem(kind="compute", where=f"compute.{field}", message=message)])
    return int(os.environ[name])


class Leader(Listener):
    """Machine 0's listener, which writes how the run ended.

    Raises UserError on a machine other than machine 0, and if another run uses this rendezvous.
    """

    def __init__(self, machines: Machines, run: str) -> None:
        if machines.rank:
            message = f"{machines.rank} is a machine that helps machine 0: start it by `finetune run`."
            raise UserError([Problem(kind="compute", where="compute.machine_rank", message=message)])
        self._folder, self._run = _meeting_folder(machines), run
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = _read_state(self._folder)
        if before is not None and _is_alive(self._folder, before.run):
            message = f"another run uses {machines.rendezvous}: choose another port, or wait until that run ends."
            raise UserError([Problem(kind="compute", where="compute.rendezvous", message=message)])
        for old in self._folder.glob("*.lock"):
            old.unlink()
        # Held until this process or the run ends.
        self._lock = os.open(self._folder / f"{run}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._ended = False
        _write_state(self._folder, LeaderState(run=run))

    def stage_ended(self, row: Row, result: Any) -> None:
        """Releases the helpers after the training."""
        if row.name == "fit" and isinstance(result, Ref):
            self._end("completed", str(result.path / "model"))

    def run_ended(self, result: dict[str, Any]) -> None:
        """Releases the helpers if the run ended before its training, and then the lock."""
        if not self._ended:
            self._end(result["state"], "\n".join(problem["message"] for problem in result["problems"]))
        os.close(self._lock)

    def _end(self, state: str, message: str) -> None:
        self._ended = True
        _write_state(self._folder, LeaderState(run=self._run, ended=state, message=message))


def gather(machines: Machines, work: Work, timeout_s: float) -> None:
    """Announces a new try of the job, and returns when all other machines have joined it.

    Raises JobFailed if a machine does not join within `timeout_s`.
    """
    folder = _meeting_folder(machines)
    state = LeaderState(run=work.run, job=work.key, attempt=uuid.uuid4().hex)
    _write_state(folder, state)
    began, is_noted = time.monotonic(), False
    while missing := [n for n in range(1, machines.count) if _read_joined(folder, n) != state.attempt]:
        waited = time.monotonic() - began
        names = f"machine {', '.join(map(str, missing))} of {machines.count}"
        if waited > timeout_s:
            message = f"No sign of {names} within {timeout_s:g} s (compute.stall_timeout_s)."
            raise JobFailed(Failure(kind="not_started", message=message))
        if waited > NOTE_AFTER_S and not is_noted:
            is_noted = True
            work.on_events([{"kind": "note", "message": f"waiting for {names}: run the same command there"}])
        time.sleep(POLL_S)


class Helper:
    """A machine other than machine 0. Create it before slow work such as look-ups: a run of machine 0 that has ended by
    then is not the one to help with."""

    def __init__(self, machines: Machines) -> None:
        self._machines, self._meeting = machines, _meeting_folder(machines)
        self._folder = self._meeting / f"machine{machines.rank}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = _read_state(self._meeting)
        self._earlier_run = state.run if state is not None and not _is_alive(self._meeting, state.run) else None
        self._handle: Handle | None = None

    def help(self, timeout_s: float, on_message: Callable[[str], None]) -> LeaderState:
        """Runs this machine's processes of each try of machine 0's training, and returns how the training ended.

        An exception, such as KeyboardInterrupt, stops the processes first: they save a checkpoint.
        """
        try:
            state = self._follow(timeout_s, on_message)
        except BaseException:
            self._stop(STOP_GRACE_S)
            raise
        self._stop(LOST_GRACE_S)
        return state

    def _follow(self, timeout_s: float, on_message: Callable[[str], None]) -> LeaderState:
        began, attempt = time.monotonic(), None
        while True:
            state = _read_state(self._meeting)
            if state is None or state.run == self._earlier_run:
                if time.monotonic() - began > timeout_s:
                    message = f"machine 0 has not begun within {timeout_s:g} s (compute.stall_timeout_s)."
                    return LeaderState(run="", ended="failed", message=message)
            elif state.ended is not None:
                return state
            elif not _is_alive(self._meeting, state.run):
                # A run writes its end before it releases its lock: without an end by now, it was killed.
                if _read_state(self._meeting) == state:
                    message = "machine 0's run was killed: run the same command again there and here."
                    return state.model_copy(update={"ended": "failed", "message": message})
            elif state.attempt != attempt and state.job is not None and state.attempt is not None:
                self._stop(LOST_GRACE_S)
                self._join(settings.home() / "jobs" / state.job)
                attempt = state.attempt
                write_atomically(self._folder / "joined", attempt.encode())
                on_message(f"training with machine 0; logs: {self._folder / 'logs'}")
            time.sleep(POLL_S)

    def _join(self, folder: Path) -> None:
        job, use_cpu = Job.read(folder), not visible_gpus()
        compute = ResolvedCompute.model_validate(job.settings["compute"])
        argv = accelerate_argv(
            job.program,
            num_processes=compute.num_processes,
            mixed_precision=compute.mixed_precision,
            use_cpu=use_cpu,
            machines=self._machines,
        )
        env = accelerate_environment(
            num_processes=compute.num_processes, use_cpu=use_cpu, strategy=compute.strategy, machines=self._machines
        )
        self._handle = start(self._folder, argv, env, work=folder)

    def _stop(self, grace_s: float) -> None:
        if self._handle is not None:
            stop(self._handle, grace_s)
        self._handle = None


def _meeting_folder(machines: Machines) -> Path:
    host, _, port = machines.rendezvous.rpartition(":")
    return settings.home() / "machines" / f"{host.replace('/', '_')}-{port}"


def _write_state(folder: Path, state: LeaderState) -> None:
    write_atomically(folder / "leader.json", state.model_dump_json().encode())


def _read_state(folder: Path) -> LeaderState | None:
    try:
        return LeaderState.model_validate_json((folder / "leader.json").read_bytes())
    except (OSError, ValueError):
        return None


def _read_joined(folder: Path, rank: int) -> str | None:
    with contextlib.suppress(OSError):
        return (folder / f"machine{rank}" / "joined").read_text()
    return None


def _is_alive(folder: Path, run: str) -> bool:
    """Whether machine 0's run still runs, on any machine."""
    return is_held(folder / f"{run}.lock")
