"""Owns a launcher's whole process tree, and with it the right to write into a job's directory.

    python -m training.jobs.supervise [--grace-s SECONDS] JOB -- COMMAND [ARGUMENT ...]

Starts the command and gives its exit status (128 + the signal's number when a signal ended it). It ends when
the command has, or when it is asked to stop, and never leaves a process behind:

* The other end of its standard input is held by whoever started it. End of file there, or a new parent, means
  that this one is gone: the job is asked to stop and soon killed.
* SIGTERM or SIGINT ask the job to stop and give it `--grace-s` to save; a second one kills at once.
* At the end every descendant is killed, orphans and those in sessions of their own included, before the
  lock is let go.

Two writers never meet. The lock is an exclusive `flock` on JOB/lock, and that open file is also the standard
input of everything below: a launcher may close what other files it likes, but it hands its standard input
on. So the lock is held until the last descendant is gone even when this process is killed; and then the
launcher is killed by Linux with it, the ranks with the launcher, and what they had started besides by the
next supervisor that wants the lock. (The file is empty: to a reader it is /dev/null.)

Where there is no Linux (macOS), orphans are not adopted and nothing dies with its parent: the command's
process group is stopped and killed, and what left the group goes on, though it keeps the lock.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from training.jobs.processes import (
    LINUX,
    SUPERVISOR,
    adopt_orphans,
    catches,
    descendants,
    die_with_parent,
    identity,
    reading_from,
    send,
    variable,
)

TICK_S = 0.05
ABANDONED_GRACE_S = 3.0
"""How long the job has once nobody waits for it: the next run may already be at the door."""
STOPPED_BEFORE_START = 128 + signal.SIGTERM


class Supervisor:
    """One job, one command, from the lock to the last process."""

    def __init__(self, job_dir: Path, argv: Sequence[str], grace_s: float) -> None:
        self._job_dir = job_dir
        self._argv = list(argv)
        self._grace_s = grace_s
        self._parent = os.getppid()
        self._watching_stdin = True
        self._kill_at: float | None = None
        self._asked: set[int] = set()
        self._launcher = 0
        self._exit_status: int | None = None

    def run(self) -> int:
        """The exit status of the command, after the last of its descendants is gone."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        adopt_orphans()
        lock = os.open(self._job_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not self._acquire(lock):
            return STOPPED_BEFORE_START
        for stale in self._job_dir.glob("outcome*.json"):
            stale.unlink()
        try:
            self._start(lock)
            while self._exit_status is None and not self._out_of_time():
                self._tick()
                self._ask()
                self._reap()
        finally:
            self._kill_all()
        return self._exit_status if self._exit_status is not None else 128 + signal.SIGKILL

    def _acquire(self, lock: int) -> bool:
        """Wait for the lock; False when asked to stop meanwhile."""
        waiting = False
        while self._kill_at is None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    raise
            if not waiting:
                waiting = True
                self._note("Waiting: the job's directory is still held by an earlier run of it.")
            self._kill_orphans()
            self._tick()
        return False

    def _kill_orphans(self) -> None:
        """Kill what a supervisor that was killed itself has left of this job."""
        for pid in reading_from(self._job_dir / "lock"):
            supervisor = variable(pid, SUPERVISOR)
            if supervisor and identity(int(supervisor.partition(":")[0])) != supervisor:
                send(pid, signal.SIGKILL)

    def _start(self, lock: int) -> None:
        with open(_new_log(self._job_dir), "ab") as log:
            parent = os.getpid()

            def tie_to_parent() -> None:
                # Between fork and exec; safe because this process has one thread.
                die_with_parent()
                if os.getppid() != parent:
                    os._exit(1)

            launcher = subprocess.Popen(
                self._argv,
                stdin=lock,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, SUPERVISOR: identity(parent)},
                close_fds=False,  # of this process's files only those that its starter handed on are inheritable
                process_group=0,
                preexec_fn=tie_to_parent,
            )
        self._launcher = launcher.pid
        # This class reaps every child by itself; the object must not wait for its own.
        launcher.returncode = 0

    def _tick(self) -> None:
        """Let a moment pass, and notice when whoever started this is gone."""
        readable = select.select([0] if self._watching_stdin else [], [], [], TICK_S)[0]
        if (readable and not os.read(0, 4096)) or os.getppid() != self._parent:
            self._watching_stdin = False
            self._stop(ABANDONED_GRACE_S)
            self._parent = os.getppid()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(self._grace_s if self._kill_at is None else 0.0)

    def _stop(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        self._kill_at = until if self._kill_at is None else min(self._kill_at, until)

    def _out_of_time(self) -> bool:
        return self._kill_at is not None and time.monotonic() >= self._kill_at

    def _ask(self) -> None:
        """Once stopping, send SIGTERM to the topmost processes that listen for it, once each.

        A launcher that does not listen would die of it and take its ranks along before they have saved, so
        its children are asked in its place. One that listens answers for its children. A program that is
        still starting is asked as soon as it listens.
        """
        if self._kill_at is None:
            return
        if not LINUX:
            if self._launcher not in self._asked:
                _send_group(self._launcher, signal.SIGTERM)
            self._asked.add(self._launcher)
            return
        below = set()
        for pid in descendants(os.getpid()):
            if pid in below:
                continue
            if catches(pid, signal.SIGTERM):
                below.update(descendants(pid))
                if pid not in self._asked:
                    send(pid, signal.SIGTERM)
                    self._asked.add(pid)

    def _reap(self) -> bool:
        """Collect the dead, the launcher's exit status among them; whether any child is left."""
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
        # Again and again: a process may start another between the look and the kill.
        if not LINUX and self._launcher:
            _send_group(self._launcher, signal.SIGKILL)
        while self._reap():
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _note(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)
        line = json.dumps({"time": time.time(), "kind": "note", "message": message})
        # The holder may have been killed within a line: close it first. Readers pass over an empty one.
        with open(self._job_dir / "events.jsonl", "ab", buffering=0) as events:
            events.write(b"\n" + line.encode() + b"\n")


def _new_log(job_dir: Path) -> Path:
    logs = job_dir / "logs"
    logs.mkdir(exist_ok=True)
    tries = [int(path.stem) for path in logs.glob("*.log") if path.stem.isdigit()]
    return logs / f"{max(tries, default=0) + 1}.log"


def _send_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.jobs.supervise")
    parser.add_argument("--grace-s", type=float, default=20.0, help="seconds to save after a request to stop")
    parser.add_argument("job", type=Path, help="the job's directory")
    parser.add_argument("argv", nargs="+", metavar="command", help="what to run, after --")
    options = parser.parse_args()
    if os.getpid() != os.getsid(0):
        os.setsid()
    return Supervisor(options.job, options.argv, options.grace_s).run()


if __name__ == "__main__":
    sys.exit(main())
