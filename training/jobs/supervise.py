"""The supervisor of a job: it owns the job's directory and the launcher's whole process tree.

    python -m training.jobs.supervise [--grace-s SECONDS] JOB -- COMMAND [ARGUMENT ...]

It starts the command and exits with the command's status (128 + the signal's number after a signal). It never leaves a
process behind:

* Its starter holds the other end of its standard input. End of file there, or a new parent, means that the starter has
  ended: the supervisor stops the job and soon kills it.
* SIGTERM or SIGINT stop the job, which has `--grace-s` to save; a second signal kills it at once.
* At the end it kills every descendant, orphans and other sessions included, and removes their half-written checkpoints,
  before it releases the lock.

Two jobs never write to one directory. The lock is an exclusive `flock` on JOB/lock, and that open file is also the
standard input of all descendants: a launcher may close other files, but passes its standard input on. So the lock is
held until the last descendant has ended, even if the supervisor is killed. Linux then kills the launcher, the ranks die
with the launcher, and the next supervisor of the job kills the rest. (The file is empty: to a reader it is /dev/null.)

A command may start before its job is known. JOB is then a folder to wait in, and the job's directory follows as a line
on the standard input: the supervisor takes the job's lock, puts the lock of its descendants in its place, and links the
job's directory as JOB/job, for which the program waits.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from training.jobs.processes import (
    JOB_LINK,
    SUPERVISOR,
    adopt_orphans,
    descendants,
    die_with_parent,
    find_readers,
    handles_signal,
    identity,
    send,
)

TICK_S = 0.05
ABANDONED_GRACE_S = 3.0
"""Seconds to save if the starter has ended: the next run of the job may already wait."""
STOPPED_BEFORE_START = 128 + signal.SIGTERM
# As in protocol.py, whose imports would make each job start later.
OUTCOMES, LOGS = "outcome*.json", "logs"
HALF_WRITTEN = "checkpoints/.writing-*"  # as staging_folder in training/engine/checkpoints.py names them
LOCK = "lock"
HOLDER = "supervisor"
"""In a job's directory: the identity of the process that took its lock last."""


class Supervisor:
    """One job, one command, from the lock to the last process.

    Args:
        job_dir: the job's directory.
        argv: the command.
        grace_s: seconds to save after a request to stop.
        forks: whether the program is a fork of this process instead of a new one.
    """

    def __init__(self, job_dir: Path, argv: Sequence[str], grace_s: float, *, forks: bool = False) -> None:
        self._job_dir = job_dir
        self._argv = list(argv)
        self._grace_s = grace_s
        self._forks = forks
        # The parent of a fork is the fork server, which may end before the job.
        self._parent = None if forks else os.getppid()
        self._watching_stdin = True
        self._kill_at: float | None = None
        self._signalled: set[int] = set()
        self._launcher = 0
        self._exit_status: int | None = None

    def run(self) -> int | None:
        """Returns the exit status of the command, after its last descendant has ended; None in the program's own
        process, if it is a fork."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        adopt_orphans()
        lock = self._acquire()
        if lock is None:
            return STOPPED_BEFORE_START
        if not self._start(lock):
            return None
        try:
            while self._exit_status is None and (self._kill_at is None or time.monotonic() < self._kill_at):
                self._wait_a_tick()
                if self._kill_at is not None:
                    self._request_stop()
                self._reap()
        finally:
            self._kill_all()
            self._remove_half_written()
        return self._exit_status if self._exit_status is not None else 128 + signal.SIGKILL

    def _acquire(self) -> int | None:
        """Waits for the lock, and removes what an earlier try reported. Returns the open file; None if a stop is
        requested meanwhile."""
        waiting = False
        while self._kill_at is None:
            if (lock := _lock(self._job_dir / LOCK)) is not None:
                (self._job_dir / HOLDER).write_text(identity(os.getpid()))
                for stale in self._job_dir.glob(OUTCOMES):
                    stale.unlink()
                return lock
            if not waiting:
                waiting = True
                self._note("Waiting: the job's directory is still held by an earlier run of it.")
            self._kill_orphans()
            self._wait_a_tick()
        return None

    def _take_job(self, job_dir: Path) -> None:
        """Continues in the directory of the job, now that it is known."""
        waiting_dir, log, self._job_dir = self._job_dir, self._log, job_dir
        if self._acquire() is None:
            return
        os.replace(waiting_dir / LOCK, job_dir / LOCK)
        os.replace(log, self._next_log())
        os.symlink(job_dir, waiting_dir / JOB_LINK)

    def _kill_orphans(self) -> None:
        """Kills the processes of this job whose supervisor was killed."""
        with contextlib.suppress(OSError, ValueError):  # the holder has not written it yet, or has ended
            holder = (self._job_dir / HOLDER).read_text()
            if identity(int(holder.partition(":")[0])) != holder:
                for pid in find_readers(self._job_dir / LOCK):
                    send(pid, signal.SIGKILL)

    def _start(self, lock: int) -> bool:
        """Starts the command. Returns False in the process of a forked program."""
        self._log = self._next_log()
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        parent = os.getpid()
        self._launcher = os.fork()
        if self._launcher:
            os.close(log)
            return True
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        for descriptor, file in ((0, lock), (1, log), (2, log)):
            os.dup2(file, descriptor)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ[SUPERVISOR] = identity(parent)
        if self._forks:
            os.close(lock)
            os.close(log)
            return False
        try:
            os.execvp(self._argv[0], self._argv)
        except OSError:
            traceback.print_exc()
        os._exit(127)

    def _next_log(self) -> Path:
        logs = self._job_dir / LOGS
        logs.mkdir(exist_ok=True)
        tries = [int(path.stem) for path in logs.glob("*.log") if path.stem.isdigit()]
        return logs / f"{max(tries, default=0) + 1}.log"

    def _wait_a_tick(self) -> None:
        """Waits TICK_S, takes the job if its directory arrives, and stops if the starter has ended."""
        readable = select.select([0] if self._watching_stdin else [], [], [], TICK_S)[0]
        line = os.read(0, 4096) if readable else b""
        if line:
            self._take_job(Path(os.fsdecode(line).removesuffix("\n")))
        orphaned = self._parent is not None and os.getppid() != self._parent
        if (readable and not line) or orphaned:
            self._watching_stdin = False
            self._stop(ABANDONED_GRACE_S)
            self._parent = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(self._grace_s if self._kill_at is None else 0.0)

    def _stop(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        self._kill_at = until if self._kill_at is None else min(self._kill_at, until)

    def _request_stop(self) -> None:
        """Sends SIGTERM once to each topmost process with a handler for it.

        SIGTERM would end a launcher without a handler, and with it its ranks before they have saved: its children get
        the signal instead. A launcher with a handler passes it on. A program that still starts gets it as soon as it
        has a handler.
        """
        below = set()
        for pid in descendants(os.getpid()):
            if pid not in below and handles_signal(pid, signal.SIGTERM):
                below.update(descendants(pid))
                if pid not in self._signalled:
                    send(pid, signal.SIGTERM)
                    self._signalled.add(pid)

    def _reap(self) -> bool:
        """Reaps ended children and records the launcher's exit status. Returns whether a child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._launcher:
                code = os.waitstatus_to_exitcode(status)
                self._exit_status = code if code >= 0 else 128 - code

    def _kill_all(self) -> None:
        while self._reap():  # repeatedly: a process may start another between the listing and the kill
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _remove_half_written(self) -> None:
        """Removes what a killed writer leaves, or a rank that wrote on after another had given up: it may have filled
        the disk."""
        for folder in self._job_dir.glob(HALF_WRITTEN):
            shutil.rmtree(folder, ignore_errors=True)

    def _note(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)
        line = json.dumps({"time": time.time(), "kind": "note", "message": message})
        # A killed writer may have left half a line: end it first. Readers skip an empty line.
        with open(self._job_dir / "events.jsonl", "ab", buffering=0) as events:
            events.write(b"\n" + line.encode() + b"\n")


def _lock(path: Path) -> int | None:
    """Opens and locks the file; None if another process holds it, or has just replaced it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    os.close(lock)
    return None


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.jobs.supervise")
    parser.add_argument("--grace-s", type=float, default=20.0, help="seconds to save after a request to stop")
    parser.add_argument("job", type=Path, help="the job's directory")
    parser.add_argument("argv", nargs="+", metavar="command", help="what to run, after --")
    options = parser.parse_args()
    if os.getpid() != os.getsid(0):
        os.setsid()
    return Supervisor(options.job, options.argv, options.grace_s).run() or 0


if __name__ == "__main__":
    sys.exit(main())
