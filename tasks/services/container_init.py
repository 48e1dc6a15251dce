"""The first process of a container.

    python -m tasks.services.container_init COMMAND [ARGUMENT ...]

It starts the command and exits with the command's status (128 + the signal's number after a signal). Linux gives the
first process of a container every orphan, and no default action for signals. So this one

* reaps orphans;
* on SIGTERM or SIGINT stops flow runs first, which save a checkpoint and report their end, while the worker is held and
  takes no other run; then the command;
* kills every process that is left when the command has ended.

A second signal kills all of them at once. Ctrl-C on a terminal reaches the command by itself. Standard library only, so
that it starts fast and stays small.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from training.jobs.processes import adopt_orphans, descendants, send, start_ticks, variable

STOP_S = 55.0
"""Seconds for runs and command to end, less than the minute that compose.yaml and worker.yaml give a container."""
TICK_S = 0.05
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""The variable of the processes of a flow run."""
RUNS_STOP_S = 40.0
RUNS_TICK_S = 0.2


class Init:
    """The command and what it leaves behind.

    Args:
        argv: the command.
    """

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._requests = 0
        self._status: int | None = None

    def run(self) -> int:
        """Runs the command, and returns its exit status when no process is left."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        adopt_orphans()  # also if it is not the first process
        try:
            # Not Popen, which reaps its child itself. Python ignores SIGPIPE, and the command shall not.
            command = os.posix_spawnp(self._argv[0], self._argv, os.environ, setsigdef=[signal.SIGPIPE])
        except OSError as error:
            print(f"{self._argv[0]}: {error.strerror}", file=sys.stderr)
            return 127 if isinstance(error, FileNotFoundError) else 126
        while self._status is None and not self._requests:
            self._reap(command)
            time.sleep(TICK_S)
        if self._status is None:
            self._stop(command)
        self._kill_all(command)
        assert self._status is not None
        return self._status

    def _stop(self, command: int) -> None:
        deadline = time.monotonic() + STOP_S
        send(command, signal.SIGSTOP)
        stop_runs(give_up=lambda: self._requests > 1)
        send(command, signal.SIGTERM)  # delivered when it continues
        send(command, signal.SIGCONT)
        while self._status is None and self._requests < 2 and time.monotonic() < deadline:
            self._reap(command)
            time.sleep(TICK_S)

    def _kill_all(self, command: int) -> None:
        while left := descendants(os.getpid()):
            for pid in left:
                send(pid, signal.SIGKILL)
            self._reap(command)
            time.sleep(TICK_S)

    def _reap(self, command: int) -> None:
        """Reaps all children that have ended, and notes the command's status."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == command:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not os.isatty(0):
            self._requests += 1


def stop_runs(give_up: Callable[[], bool] = lambda: False) -> None:
    """Stops each flow run below this process: it saves a checkpoint and reports its end to the servers, which still
    run. Returns when all have ended, after `RUNS_STOP_S` at most, or when `give_up` is true."""
    first_process: dict[str, int] = {}  # of each flow run
    for pid in descendants(os.getpid()):  # parents come before children: a run stops its children itself
        if run := variable(pid, FLOW_RUN):
            first_process.setdefault(run, pid)
    for pid in first_process.values():
        send(pid, signal.SIGTERM)
    deadline = time.monotonic() + RUNS_STOP_S
    while any(start_ticks(pid) for pid in first_process.values()):
        if time.monotonic() > deadline or give_up():
            return
        time.sleep(RUNS_TICK_S)


def main() -> None:
    """Runs the command of the command line."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tasks.services.container_init COMMAND [ARGUMENT ...]")
    sys.exit(Init(sys.argv[1:]).run())


if __name__ == "__main__":
    main()
