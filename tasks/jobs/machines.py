"""One training on several machines: machine 0 runs the flow, the others their processes of its training.

All of them see one home, under one path, and talk through it:

    <home>/machines/<host>-<port>/said.json     what machine 0 last said: its run, a try of a job, how the run ended
                                  RUN.lock      held by that run, as long as it lives
                                  machine1/     where machine 1's supervisor works; `joined`: the try that it is in

A try begins when every machine has joined it, so that no process of an earlier one meets those of the next.
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
from tasks.cache.locks import held
from tasks.cache.refs import Ref
from tasks.cache.stage import Listener, Row, Work
from tasks.jobs.hardware import visible_gpus
from tasks.jobs.launch import (
    STOP_GRACE_S,
    Handle,
    JobFailed,
    Machines,
    accelerate_argv,
    accelerate_environment,
    start,
    stop,
)
from training.jobs.protocol import Failure, Job, write_atomically
from training.problems import Problem, UserError
from training.recipe import Compute, ResolvedCompute

POLL_S = 0.2
LOST_GRACE_S = 1.0
"""What this machine's processes have to end once machine 0's are gone: they have nobody to save with."""
PATIENT_S = 5.0
"""How long machine 0 waits for the others before it says so."""


class Said(BaseModel):
    """What machine 0 last said."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """Its flow run."""
    job: str | None = None
    """The job's key, once there is one to help with."""
    attempt: str | None = None
    """Names the try of the job."""
    ended: str | None = None
    """How the run, or its training, ended: completed, failed or interrupted."""
    message: str = ""
    """The model's folder, or why it failed."""


def machines_of(compute: Compute) -> Machines:
    """The machines that train by this recipe, from the recipe or else the environment.

    Raises UserError where it does not say which of several machines this one is, or where they meet.
    """
    count = _number("num_machines", compute.num_machines, ("NNODES", "SLURM_NNODES"), 1)
    if count is None or count < 2:
        return Machines()
    rank = _number("machine_rank", compute.machine_rank, ("NODE_RANK", "SLURM_NODEID"), None)
    host, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    rendezvous = compute.rendezvous or (f"{host}:{port}" if host and port else None)
    problems = []
    if rank is None or rank >= count:
        message = f"is missing: say which of the {count} machines this one is, 0 to {count - 1}, here or in NODE_RANK."
        if rank is not None:
            message = f"{rank} is out of range: there are {count} machines, 0 to {count - 1}."
        problems.append(Problem(kind="compute", where="compute.machine_rank", message=message))
    if rendezvous is None:
        message = "is missing: name host:port of machine 0, here or in MASTER_ADDR and MASTER_PORT."
        problems.append(Problem(kind="compute", where="compute.rendezvous", message=message))
    elif not rendezvous.rpartition(":")[2].isdecimal():
        message = f"{rendezvous!r} in MASTER_ADDR and MASTER_PORT is no host:port: set the field, or these."
        problems.append(Problem(kind="compute", where="compute.rendezvous", message=message))
    if problems or rank is None or rendezvous is None:
        raise UserError(problems)
    return Machines(count, rank, rendezvous)


def _number(field: str, written: int | str | None, names: tuple[str, ...], default: int | None) -> int | None:
    if isinstance(written, int):
        return written
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return default
    if not os.environ[name].isdecimal():
        message = f"{name}={os.environ[name]!r} in the environment is no number: set the field, or {name}."
        raise UserError([Problem(kind="compute", where=f"compute.{field}", message=message)])
    return int(os.environ[name])


class Leader(Listener):
    """Machine 0's part beside its stages: a listener that tells the others how the run ended.

    Raises UserError for a machine that is not machine 0, and where another run leads at this place.
    """

    def __init__(self, machines: Machines, run: str) -> None:
        if machines.rank:
            message = f"{machines.rank} is a machine that helps machine 0: start it by `finetune run`."
            raise UserError([Problem(kind="compute", where="compute.machine_rank", message=message)])
        self._room, self._run = _room(machines), run
        self._room.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = _said(self._room)
        if before is not None and _alive(self._room, before.run):
            message = f"another run meets its machines at {machines.rendezvous}: choose another port, or wait for it."
            raise UserError([Problem(kind="compute", where="compute.rendezvous", message=message)])
        for old in self._room.glob("*.lock"):
            old.unlink()
        # Held until this process ends or the run does.
        self._lock = os.open(self._room / f"{run}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._ended = False
        _say(self._room, Said(run=run))

    def stage_ended(self, row: Row, result: Any) -> None:
        """Once training is over, the others are not needed any more."""
        if row.name == "fit" and isinstance(result, Ref):
            self._end("completed", str(result.path / "model"))

    def run_ended(self, result: dict[str, Any]) -> None:
        """Tells the others where that happened before training was over, and lets go."""
        if not self._ended:
            told = "\n".join(problem["message"] for problem in result["problems"])
            self._end(result["state"], told)
        os.close(self._lock)

    def _end(self, state: str, message: str) -> None:
        self._ended = True
        _say(self._room, Said(run=self._run, ended=state, message=message))


def gather(machines: Machines, work: Work, timeout_s: float) -> None:
    """Has the other machines join a new try of the job, and returns when all have.

    Raises JobFailed where one has not come within `timeout_s`.
    """
    room = _room(machines)
    said = Said(run=work.run, job=work.key, attempt=uuid.uuid4().hex)
    _say(room, said)
    began, told = time.monotonic(), False
    while missing := [n for n in range(1, machines.count) if _joined(room, n) != said.attempt]:
        waited = time.monotonic() - began
        names = f"machine {', '.join(map(str, missing))} of {machines.count}"
        if waited > timeout_s:
            message = f"Nothing was heard of {names} within {timeout_s:g} s (compute.stall_timeout_s)."
            raise JobFailed(Failure(kind="not_started", message=message))
        if waited > PATIENT_S and not told:
            told = True
            work.on_events([{"kind": "note", "message": f"waiting for {names}: run the same command there"}])
        time.sleep(POLL_S)


class Helper:
    """The part of a machine that is not machine 0. Make it before anything is looked up: a run of machine 0 that ended
    before is not the one to help with."""

    def __init__(self, machines: Machines) -> None:
        self._machines, self._room = machines, _room(machines)
        self._folder = self._room / f"machine{machines.rank}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        said = _said(self._room)
        self._over = said.run if said is not None and not _alive(self._room, said.run) else None
        self._handle: Handle | None = None

    def help(self, timeout_s: float, say: Callable[[str], None]) -> Said:
        """Runs this machine's processes of each try of machine 0's training, and gives how that ended.

        Any exception, Ctrl-C above all, stops the processes first: they save.
        """
        try:
            said = self._follow(timeout_s, say)
        except BaseException:
            self._stop(STOP_GRACE_S)
            raise
        self._stop(LOST_GRACE_S)
        return said

    def _follow(self, timeout_s: float, say: Callable[[str], None]) -> Said:
        began, attempt = time.monotonic(), None
        while True:
            said = _said(self._room)
            if said is None or said.run == self._over:
                if time.monotonic() - began > timeout_s:
                    message = f"machine 0 has not begun within {timeout_s:g} s (compute.stall_timeout_s)."
                    return Said(run="", ended="failed", message=message)
            elif said.ended is not None:
                return said
            elif not _alive(self._room, said.run):
                # It says how it ended before it lets go: if it has said nothing by now, it was killed.
                told = _said(self._room)
                if told == said:
                    message = "machine 0's run was killed: run the same command again there and here."
                    return said.model_copy(update={"ended": "failed", "message": message})
            elif said.attempt != attempt and said.job is not None and said.attempt is not None:
                self._stop(LOST_GRACE_S)
                self._join(settings.home() / "jobs" / said.job)
                attempt = said.attempt
                write_atomically(self._folder / "joined", attempt.encode())
                say(f"training with machine 0; logs: {self._folder / 'logs'}")
            time.sleep(POLL_S)

    def _join(self, job: Path) -> None:
        asked, use_cpu = Job.read(job), not visible_gpus()
        compute = ResolvedCompute.model_validate(asked.settings["compute"])
        processes = compute.num_processes
        argv = accelerate_argv(
            asked.program,
            num_processes=processes,
            mixed_precision=compute.mixed_precision,
            use_cpu=use_cpu,
            machines=self._machines,
        )
        env = accelerate_environment(
            num_processes=processes, use_cpu=use_cpu, strategy=compute.strategy, machines=self._machines
        )
        self._handle = start(self._folder, argv, env, work=job)

    def _stop(self, grace_s: float) -> None:
        if self._handle is not None:
            stop(self._handle, grace_s)
        self._handle = None


def _room(machines: Machines) -> Path:
    host, _, port = machines.rendezvous.rpartition(":")
    return settings.home() / "machines" / f"{host.replace('/', '_')}-{port}"


def _say(room: Path, said: Said) -> None:
    write_atomically(room / "said.json", said.model_dump_json().encode())


def _said(room: Path) -> Said | None:
    try:
        return Said.model_validate_json((room / "said.json").read_bytes())
    except (OSError, ValueError):
        return None


def _joined(room: Path, rank: int) -> str | None:
    with contextlib.suppress(OSError):
        return (room / f"machine{rank}" / "joined").read_text()
    return None


def _alive(room: Path, run: str) -> bool:
    """Whether the run that said something still lives, on whichever machine."""
    return held(room / f"{run}.lock")
