"""The early launcher: a program that starts before its job is known, imports, and waits for the job.

<home>/waiting/PID:TICKS-…/    the folder of a launcher that waits, named by the process that started it
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tasks.environment import added_environment, environment
from tasks.home import home
from tasks.jobs import warm
from tasks.jobs.supervisors import Handle, pass_job, start_supervisor, stop
from tasks.locks import is_held
from training.jobs.processes import identity
from training.jobs.protocol import IMPORTS, LOGS, Imports, write_atomically

_current: EarlyLaunch | None = None
_closing = contextlib.ExitStack()


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
        warm.start()
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        warm.wait_for(warm.TRAINING[-1])  # forks need not import these modules then
        with self._turn, contextlib.suppress(OSError):  # without it, the program starts with its job
            if self._closed:
                return
            _remove_abandoned()
            self._folder = Path(tempfile.mkdtemp(prefix=f"{identity(os.getpid())}-", dir=_waiting_folder()))
            (self._folder / LOGS).mkdir()
            write_atomically(self._folder / IMPORTS, self._imports.model_dump_json().encode())
            argv = [*self._argv, str(self._folder)]
            self._handle = start_supervisor(self._folder, argv, environment(self._env))

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
            return pass_job(handle, job)
        stop(handle, 0)
        return None

    def close(self) -> None:
        """Ends the command if it still waits, and removes its folder."""
        with self._turn:
            self._closed = True
            if self._handle is not None:
                stop(self._handle, 0)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def start(argv: Sequence[str], env: Mapping[str, str], imports: Imports) -> None:
    """Starts a command whose job is not known yet, inside `early_launches`, unless one waits already."""
    global _current
    if _current is None:
        _current = EarlyLaunch(argv, env, imports)


def take(job: Path, argv: Sequence[str], env: Mapping[str, str]) -> Handle | None:
    """The handle of the waiting command, which continues with this job; None if there is none for it."""
    return _current.take(job, argv, env) if _current else None


def at_end(close: Callable[[], None]) -> None:
    """Has this called at the end of `early_launches`, for what else starts before its job is known."""
    _closing.callback(close)


@contextlib.contextmanager
def early_launches(warm_process: bool = True) -> Iterator[None]:
    """Inside, one program may start before its job is known. With a warm process, programs are forks of it."""
    global _current
    with warm.warm_programs() if warm_process else contextlib.nullcontext():
        try:
            yield
        finally:
            if _current is not None:
                _current.close()
                _current = None
            _closing.close()


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
