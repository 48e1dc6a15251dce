"""The frame of a job's program: it dies with its supervisor, stops on request, and writes its outcome at the end."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import NoReturn

from training.jobs.processes import JOB_LINK, SUPERVISOR, die_with_parent, identity
from training.jobs.protocol import (
    CHECKPOINTS,
    EVENTS,
    IMPORTS,
    LOGS,
    OUTCOME,
    OUTPUT,
    Events,
    Failure,
    FailureKind,
    Imports,
    Job,
    Outcome,
    crash_file,
    fsync,
    rank,
    sha256,
    write_atomically,
)
from training.jobs.search_path import any_missed, files_changed, hide_package, imported_files, use_search_path
from training.problems import UserError, full_disk, user_code_error


class Interrupted(KeyboardInterrupt):
    """A requested stop of the program. `except Exception` does not catch it."""


_GC_THRESHOLD = gc.get_threshold()
_OUT_OF_MEMORY = (
    *("can't allocate memory", "Cannot allocate memory", "out of memory", "ALLOC_FAILED", "bad_alloc"),
    *("can't start new thread", "could not create a primitive"),  # the last is oneDNN's
)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_stop_requested = False  # a signal handler sets it, which has no parameters


def restore_garbage_collection() -> None:
    """Python's usual garbage collection, without the objects so far: a long program calls it after its imports."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)


def stop_requested() -> bool:
    """Whether this program has received SIGTERM or SIGINT."""
    return _stop_requested


def restart_with(packages: Collection[str]) -> None:
    """Starts this program anew if one of the packages was hidden while libraries were imported."""
    if any_missed(packages):
        restart()


def restart() -> NoReturn:
    """Starts this program anew, in the same process: it then imports its modules as they are now.

    A request to stop is not lost: it stays pending until the new program has its handlers. If it reaches another thread
    of this program, it ends the program.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if _stop_requested:
        signal.raise_signal(signal.SIGTERM)
    sys.stdout.flush()
    sys.stderr.flush()
    program = sys.modules["__main__"].__spec__
    assert program is not None, "it was started by `python -m`"
    os.execv(sys.executable, [sys.executable, "-m", program.name, *sys.argv[1:]])


def run_program(main: Callable[[Path, Job, Events], object], *, stops_itself: bool = False) -> NoReturn:
    """Runs `main(job_dir, job, events)` for the job directory in argv[1], writes the outcome, and exits.

    `main` returns the outcome's result. A UserError becomes user_error with all problems, and so does the error of a
    full disk; out of memory becomes out_of_memory, SIGTERM or SIGINT interrupted, any other error internal with its
    traceback. The exit status is 0 only if the job finished. Every rank calls this; rank 0 alone writes success.

    A request to stop raises Interrupted in `main` at once. A main that saves first passes `stops_itself=True`, checks
    `stop_requested()` now and then, and raises Interrupted when it has saved; if it returns, the job has finished.

    Call this before heavy imports, and import in `main`: only from here on does a program die with its supervisor and
    stop on request.
    """
    # Importing torch and transformers creates some 100,000 objects that all stay: searching them for garbage takes a
    # tenth of the time.
    gc.set_threshold(50_000, 50, 50)
    _die_with_supervisor()
    _handle_stop_signals(raises=not stops_itself)
    use_search_path()
    job_dir = _await_job(Path(sys.argv[1]))
    if rank() > 0:
        _redirect_output(job_dir / LOGS / f"rank{rank()}.log")
    file = job_dir / (OUTCOME if rank() == 0 else f"outcome.rank{rank()}.json")
    file.unlink(missing_ok=True)
    try:
        result = _run(main, job_dir)
        outcome = Outcome(state="finished", result=result, files=_sync(job_dir / OUTPUT) if rank() == 0 else {})
    except BaseException as error:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        traceback.print_exc()
        outcome = Outcome(state="failed", failure=_failure(_find_users_mistake(error, job_dir)))
    faulthandler.disable()  # a crash at exit comes after the outcome
    if rank() == 0 or outcome.state == "failed":
        write_atomically(file, outcome.model_dump_json(indent=1).encode())
    sys.exit(0 if outcome.state == "finished" else 1)


def _await_job(folder: Path) -> Path:
    """The job's directory: `folder`, unless the program starts before its job is known."""
    job, imports = folder / JOB_LINK, folder / IMPORTS
    if not imports.exists():
        return folder
    if job.exists():  # the program has started anew: see below
        return job.resolve()
    _import_early(Imports.model_validate_json(imports.read_bytes()))
    while not job.exists():
        if _stop_requested:
            sys.exit(1)
        time.sleep(0.02)
    if files_changed(imported_files()):  # the artifact's key names the code of now
        restart()
    return job.resolve()


def _import_early(imports: Imports) -> None:
    restart_with(imports.needed)
    with contextlib.ExitStack() as hidden:
        for package in imports.hidden:
            hidden.enter_context(hide_package(package))
        for module in imports.modules:
            with contextlib.suppress(Exception):  # `main` imports it again, and reports the error
                importlib.import_module(module)
            if _stop_requested:
                return


def _run(main: Callable[[Path, Job, Events], object], job_dir: Path) -> object:
    job = Job.read(job_dir)
    for folder in (CHECKPOINTS, LOGS):
        (job_dir / folder).mkdir(exist_ok=True)
    # A crash in native code leaves no outcome; its traceback is in this file.
    crash = os.open(crash_file(job_dir, rank()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    faulthandler.enable(crash)
    if rank() == 0:
        shutil.rmtree(job_dir / OUTPUT, ignore_errors=True)
        (job_dir / OUTPUT).mkdir()
    events = Events(job_dir / EVENTS)
    events.write("started", program=job.program, rank=rank(), pid=os.getpid())
    return main(job_dir, job, events)


def _redirect_output(log: Path) -> None:
    """Sends this process's output to its own file: lines of several ranks in one file would mix."""
    log.parent.mkdir(exist_ok=True)
    with open(log, "ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


def _die_with_supervisor() -> None:
    if supervisor := os.environ.get(SUPERVISOR):
        die_with_parent()
        # It may have died before the line above took effect; then nothing would ever stop this process.
        if identity(int(supervisor.partition(":")[0])) != supervisor:
            os._exit(1)


def _handle_stop_signals(*, raises: bool) -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        global _stop_requested
        _stop_requested = True
        if raises:
            raise Interrupted(f"stopped by {signal.Signals(number).name}")

    for number in _STOP_SIGNALS:
        signal.signal(number, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)  # `restart` has blocked them


def _find_users_mistake(error: BaseException, job_dir: Path) -> BaseException:
    """The user's mistake behind an error, which is a full disk or the code of a user's task type; else the error."""
    if full := full_disk(job_dir, error):
        return full
    if not isinstance(error, Exception) or is_out_of_memory(error) or _is_lost_rank(error):
        return error
    with contextlib.suppress(OSError, ValueError):  # a job that cannot be read, which may be the error itself
        module, colon, _ = str(Job.read(job_dir).settings.get("task", "")).partition(":")
        return (colon and user_code_error(module, error)) or error
    return error


def _failure(error: BaseException) -> Failure:
    if isinstance(error, UserError):
        return Failure(kind="user_error", message=str(error), rank=rank(), problems=error.problems)
    is_ours = type(error).__module__.partition(".")[0] in ("tasks", "training")  # their messages need no class name
    message = str(error) if is_ours else "".join(traceback.format_exception_only(error)).strip()
    kind: FailureKind = "internal"
    if isinstance(error, KeyboardInterrupt):
        kind, message = "interrupted", str(error) or "The program was stopped on request."
    elif is_out_of_memory(error):
        kind = "out_of_memory"
    elif _is_lost_rank(error):
        kind = "lost_rank"
    text = "".join(traceback.format_exception(error))
    return Failure(kind=kind, message=message, traceback=text, rank=rank())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the machine's or a GPU's memory ran out."""
    # By names and texts, because torch is not imported here.
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or any(text in str(error) for text in _OUT_OF_MEMORY)


def _is_lost_rank(error: BaseException) -> bool:
    # Gloo's errors are plain RuntimeErrors that begin with the place in its source; the others have names.
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"DistBackendError", "DistNetworkError"}) or "/gloo/" in str(error)


def _sync(output: Path) -> dict[str, str]:
    """Syncs all files of output/ to the disk. Returns the digest of each."""
    files = {}
    for path in sorted(output.rglob("*")):
        if path.is_file():
            files[path.relative_to(output).as_posix()] = sha256(path)
        fsync(path)
    fsync(output)
    return files
