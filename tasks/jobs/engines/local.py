"""Jobs on this machine, each under training.jobs.supervise, and programs that start before their job is known.

    <home>/waiting/PID:TICKS-…/    the folder of a program that waits, named by the process that started it

A job stops when the process that started it ends. A program that waits imports meanwhile, and then gets its job.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from tasks.environment_variables import added_environment, environment
from tasks.home import home
from tasks.jobs import fork_client
from tasks.jobs.engines.engine import Engine, OnEvents, Program
from tasks.locks import is_held
from training.jobs.processes import identity, send, start_ticks
from training.jobs.protocol import IMPORTS, LOGS, OUTCOMES, Imports, write_atomically
from training.jobs.resources import Kills, killed_for_memory
from training.problems import Problem
from training.recipe import ResolvedCompute

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


class LocalEngine(Engine):
    """The engine of this machine, and the runner of each job on it."""

    runs_here = True

    def __init__(self) -> None:
        self._early: EarlyLaunch | None = None

    def find_package_problems(self) -> list[Problem]:
        """No problem: this machine needs no further package."""
        return []

    def find_address_problems(self) -> list[Problem]:
        """No problem: this machine has no address."""
        return []

    def describe(self, compute: ResolvedCompute) -> str | None:
        """None: `finetune plan` shows the memory and disk of this machine otherwise."""
        return None

    def keep_open(self, several: bool) -> contextlib.AbstractContextManager[None]:
        """Nothing: programs share the fork server inside `early_launches`."""
        return contextlib.nullcontext()

    def start_early(self, program: Program) -> None:
        """Starts the program before its job is known, inside `early_launches`, unless one waits already."""
        if self._early is None:
            self._early = EarlyLaunch(program.argv, program.env, program.imports)
            at_end(self._end_early)

    def runner(self, program: Program, inputs: Mapping[str, Path], on_events: OnEvents) -> LocalEngine:
        """This object: a job's files are here, and a waiting program is found by its command."""
        return self

    def start(self, job: Path, argv: Sequence[str], env: Mapping[str, str]) -> Handle:
        """Starts `argv` with the job's folder as its last argument, under a supervisor.

        `env` has precedence over this process's environment; secrets belong there and not into argv.
        """
        job = job.resolve()
        (job / LOGS).mkdir(parents=True, exist_ok=True)
        for outcome in job.glob(OUTCOMES):
            outcome.unlink()  # of an earlier try: this one may be killed before it writes its own
        (job / LOGS / "supervisor.log").touch()  # a log of each try, also of one that is killed before it takes the job
        early = self._early.take(job, argv, env) if self._early else None
        return early or _start_supervisor(job, [*argv, str(job)], environment(env))

    def poll(self, handle: Handle) -> bool:
        """Whether the job still runs; False only after its supervisor and all processes below it have ended."""
        if start_ticks(handle.pid) == handle.started != 0:
            return True
        if lifeline := _lifelines.pop(handle.pid, None):
            os.close(lifeline)
            with contextlib.suppress(ChildProcessError):  # a fork is the fork server's child
                os.waitpid(handle.pid, 0)
        return False

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Returns as soon as the job's supervisor ends, at the latest after `timeout_s`."""
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(handle.pid)
            try:
                ended = select.poll()
                ended.register(process, select.POLLIN)
                ended.poll(1000 * timeout_s)
            finally:
                os.close(process)

    def stop(self, handle: Handle, grace_s: float) -> None:
        """Stops the job, kills its remaining processes after `grace_s`, and returns when all have ended."""
        deadline = time.monotonic() + grace_s
        if self.poll(handle):
            send(handle.pid, signal.SIGTERM)
        while self.poll(handle) and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.poll(handle):
            send(handle.pid, signal.SIGTERM)  # at the second signal the supervisor kills
        while self.poll(handle):
            time.sleep(0.05)

    def logs(self, handle: Handle) -> Path:
        """The output of the job's last try."""
        return newest_log(Path(handle.job))

    def killed_for_memory(self) -> Kills:
        """The processes that this machine has killed for want of memory."""
        return killed_for_memory()

    def _end_early(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None


LOCAL = LocalEngine()


def newest_log(job: Path) -> Path:
    """The file with the output of a job's last try."""
    tries = (job / LOGS).glob("[!r]*.log")  # ranks above 0 have files of their own
    return max(tries, key=lambda path: path.stat().st_mtime_ns)


def _start_supervisor(job: Path, argv: Sequence[str], env: Mapping[str, str]) -> Handle:
    """Starts a command under a supervisor of the job's folder. The job stops when this process ends.

    `env`: the whole environment.
    """
    request = {"folder": str(job), "argv": [*argv], "env": dict(env), "grace_s": STOP_GRACE_S}
    with open(job / LOGS / "supervisor.log", "ab") as log:
        pid = _start(lambda stdin, lifeline: fork_client.fork(request, stdin, lifeline, log)) or _start(
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


class EarlyLaunch:
    """A command that waits for its job.

    Args:
        argv: the command without its last argument, the job's folder.
        env: variables in addition to those of all jobs.
        imports: what the program imports meanwhile.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], imports: Imports) -> None:
        self._argv, self._env, self._imports = [*argv], added_environment(env), imports
        self._folder: Path | None = None
        self._handle: Handle | None = None
        self._closed = False
        self._turn = threading.Lock()
        fork_client.start()
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        fork_client.wait_for(fork_client.TRAINING[-1])  # forks need not import these modules then
        with self._turn, contextlib.suppress(OSError):  # without it, the program starts with its job
            if self._closed:
                return
            _remove_abandoned()
            self._folder = Path(tempfile.mkdtemp(prefix=f"{identity(os.getpid())}-", dir=_waiting_folder()))
            (self._folder / LOGS).mkdir()
            write_atomically(self._folder / IMPORTS, self._imports.model_dump_json().encode())
            argv = [*self._argv, str(self._folder)]
            self._handle = _start_supervisor(self._folder, argv, environment(self._env))

    def take(self, job: Path, argv: Sequence[str], env: Mapping[str, str]) -> Handle | None:
        """Continues with this job and returns its handle. None if the job has another command, or if this one has
        ended."""
        if argv[-1] != self._argv[-1]:  # a job of another program
            return None
        self._thread.join()
        handle, self._handle = self._handle, None
        if handle is None:
            return None
        if (self._argv, self._env) == ([*argv], added_environment(env)):
            return _pass_job(handle, job)
        LOCAL.stop(handle, 0)
        return None

    def close(self) -> None:
        """Ends the command if it still waits, and removes its folder."""
        with self._turn:
            self._closed = True
            if self._handle is not None:
                LOCAL.stop(self._handle, 0)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def _pass_job(handle: Handle, job: Path) -> Handle | None:
    """Gives a job to a command that waits for it in the handle's folder. None if its supervisor has ended."""
    try:
        os.write(_lifelines[handle.pid], os.fsencode(job) + b"\n")
    except BrokenPipeError:
        return None
    return handle.model_copy(update={"job": str(job)})


_closing = contextlib.ExitStack()  # of this process, like the fork server


@contextlib.contextmanager
def early_launches(forks: bool = True) -> Iterator[None]:
    """Inside, one program may start before its job is known. With a fork server, programs are forks of it."""
    with fork_client.forked_programs() if forks else contextlib.nullcontext():
        try:
            yield
        finally:
            _closing.close()


def at_end(close: Callable[[], None]) -> None:
    """Calls this at the end of `early_launches`, which ends what an engine has started early."""
    _closing.callback(close)


def _waiting_folder() -> Path:
    folder = home() / "waiting"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _remove_abandoned() -> None:
    """Removes the folders of processes that have been killed. Those of another machine's processes are locked."""
    for folder in _waiting_folder().glob("*:*-*"):
        owner, lock = folder.name.partition("-")[0], folder / "lock"
        if identity(int(owner.partition(":")[0])) != owner and lock.exists() and not is_held(lock):
            shutil.rmtree(folder, ignore_errors=True)
