"""How a program of a job runs: it dies with its supervisor, can be asked to stop, and tells at the end how it ended."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from training.jobs.processes import SUPERVISOR, die_with_parent, identity
from training.jobs.protocol import (
    CHECKPOINTS,
    EVENTS,
    LOGS,
    OUTCOME,
    OUTPUT,
    Events,
    Failure,
    FailureKind,
    Job,
    Outcome,
    crash_file,
    fsync,
    rank,
    sha256,
    write_atomically,
)
from training.jobs.search_path import use_search_path
from training.problems import UserError, full_disk, mistake_in


class Interrupted(KeyboardInterrupt):
    """Somebody asked the program to stop. No `except Exception` on the way may swallow it."""


USUAL = gc.get_threshold()
_stop_requested = False


def collect_garbage_as_usual() -> None:
    """For a program that goes on for long, when all is imported: that stays, and is not looked through again."""
    gc.freeze()
    gc.set_threshold(*USUAL)


def stop_requested() -> bool:
    """Whether this program was asked to stop (SIGTERM or SIGINT)."""
    return _stop_requested


def run_program(main: Callable[[Path, Job, Events], dict[str, Any]], *, stops_itself: bool = False) -> NoReturn:
    """Run `main(job_dir, job, events)` for the job directory in argv[1], tell how it ended, and exit.

    What `main` returns are the outcome's figures. A UserError it raises becomes user_error with all problems, and
    so does an error that came of a full disk; running out of memory becomes out_of_memory, SIGTERM or SIGINT
    interrupted, anything else internal with its traceback. The exit status is 0 only when the job finished. Every
    rank calls this; rank 0 alone tells of success.

    Being asked to stop raises Interrupted in `main` at once. A main that wants to save first passes
    `stops_itself=True`, looks at `stop_requested()` now and then, and raises Interrupted when it is ready;
    one that returns instead has finished.

    Call this before heavy imports and have `main` do those: a program dies with its supervisor, and
    can be asked to stop, from here on only.
    """
    # Importing torch and transformers makes objects by the hundred thousand, all of which stay: to look through them
    # for what could go takes a tenth of the time.
    gc.set_threshold(50_000, 50, 50)
    _die_with_supervisor()
    _listen_for_stop(raises=not stops_itself)
    use_search_path()
    job_dir = Path(sys.argv[1])
    if rank() > 0:
        _print_into(job_dir / LOGS / f"rank{rank()}.log")
    told = job_dir / (OUTCOME if rank() == 0 else f"outcome.rank{rank()}.json")
    told.unlink(missing_ok=True)
    try:
        figures = _run(main, job_dir)
        outcome = Outcome(state="finished", figures=figures, files=_settle(job_dir / OUTPUT) if rank() == 0 else {})
    except BaseException as error:
        _ignore_stop()
        traceback.print_exc()
        outcome = Outcome(state="failed", failure=_failure(_told(error, job_dir)))
    faulthandler.disable()  # what crashes at exit does so after all is told
    if rank() == 0 or outcome.state == "failed":
        write_atomically(told, outcome.model_dump_json(indent=1).encode())
    sys.exit(0 if outcome.state == "finished" else 1)


def _run(main: Callable[[Path, Job, Events], dict[str, Any]], job_dir: Path) -> dict[str, Any]:
    job = Job.read(job_dir)
    for folder in (CHECKPOINTS, LOGS):
        (job_dir / folder).mkdir(exist_ok=True)
    # Native code that crashes leaves no outcome; this file then says where it was.
    crash = os.open(crash_file(job_dir, rank()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    faulthandler.enable(crash)
    if rank() == 0:
        shutil.rmtree(job_dir / OUTPUT, ignore_errors=True)
        (job_dir / OUTPUT).mkdir()
    events = Events(job_dir / EVENTS)
    events.write("started", program=job.program, rank=rank(), pid=os.getpid())
    return main(job_dir, job, events)


def _print_into(log: Path) -> None:
    """Sends what this process prints into a file of its own: lines of several ranks in one would mix."""
    log.parent.mkdir(exist_ok=True)
    with open(log, "ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


def _die_with_supervisor() -> None:
    """Tie this process's life to its supervisor's, where it has one."""
    if supervisor := os.environ.get(SUPERVISOR):
        die_with_parent()
        # It may have died before the line above took effect; then nobody would ever stop this process.
        if identity(int(supervisor.partition(":")[0])) != supervisor:
            os._exit(1)


def _listen_for_stop(*, raises: bool) -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        global _stop_requested
        _stop_requested = True
        if raises:
            raise Interrupted(f"asked to stop by {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


def _ignore_stop() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _told(error: BaseException, job_dir: Path) -> BaseException:
    """The error, or the user's mistake that it comes of: a full disk, or the code of a task type of their own."""
    if full := full_disk(job_dir, error):
        return full
    if not isinstance(error, Exception) or is_out_of_memory(error) or _is_lost_rank(error):
        return error
    with contextlib.suppress(OSError, ValueError):  # a job that cannot be read, which may be the error itself
        module, own, _ = str(Job.read(job_dir).settings.get("task", "")).partition(":")
        return (own and mistake_in(module, error)) or error
    return error


def _failure(error: BaseException) -> Failure:
    if isinstance(error, UserError):
        return Failure(kind="user_error", message=str(error), rank=rank(), problems=error.problems)
    own = type(error).__module__.partition(".")[0] in ("tasks", "training")  # these speak for themselves
    message = str(error) if own else "".join(traceback.format_exception_only(error)).strip()
    kind: FailureKind = "internal"
    if isinstance(error, KeyboardInterrupt):
        kind, message = "interrupted", str(error) or "The program was asked to stop."
    elif is_out_of_memory(error):
        kind = "out_of_memory"
    elif _is_lost_rank(error):
        kind = "lost_rank"
    text = "".join(traceback.format_exception(error))
    return Failure(kind=kind, message=message, traceback=text, rank=rank())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, the machine's or a GPU's."""
    # torch is not imported here: its error is known by name, and those of allocators and drivers by their words.
    names = {cls.__name__ for cls in type(error).__mro__}
    words = ("can't allocate memory", "Cannot allocate memory", "out of memory", "ALLOC_FAILED", "bad_alloc")
    no_stack = "can't start new thread"
    if str(error) == "could not create a primitive":  # oneDNN's
        return True
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or any(word in str(error) for word in (*words, no_stack))


def _is_lost_rank(error: BaseException) -> bool:
    # Gloo's errors are plain RuntimeErrors that begin with the place in its source; the others have names.
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"DistBackendError", "DistNetworkError"}) or "/gloo/" in str(error)


def _settle(output: Path) -> dict[str, str]:
    """Have the disk hold everything under output/, and give the digest of every file."""
    files = {}
    for path in sorted(output.rglob("*")):
        if path.is_file():
            files[path.relative_to(output).as_posix()] = sha256(path)
        fsync(path)
    fsync(output)
    return files
