"""Looks at the machine's processes while runs are killed: who is left, and whether two write at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.drill.ground import MARK, Run
from tests.drill.promises import Broken
from tests.processes import argv
from training.jobs.processes import send, variable

ENDED_WITHIN_S = 5.0


class Watch:
    """Keeps what it found wrong in `faults`, a line each."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.left = 0
        """Processes that outlived their run."""
        self._condemned: list[tuple[float, Run]] = []

    def condemn(self, run: Run) -> None:
        """From `ENDED_WITHIN_S` on, nothing of this run may be left."""
        self._condemned.append((time.monotonic() + ENDED_WITHIN_S, run))

    def look(self) -> None:
        """Takes one look at everything that belongs to this drill."""
        ours = {pid: mark for pid in _pids() if (mark := _mark(pid))}
        self._look_for_survivors(ours)
        self._look_for_two_writers(ours)

    def look_until(self, deadline: float, run: Run) -> bool:
        """Keeps looking till the deadline (of the monotonic clock), or the run's end; whether it still runs."""
        while (remaining := deadline - time.monotonic()) > 0:
            if run.process.poll() is not None:
                return False
            self.look()
            time.sleep(max(0.0, min(0.2, remaining, deadline - time.monotonic())))
        return run.process.poll() is None

    def exit_status(self, run: Run, within_s: float, victim: Callable[[Run], int] = lambda run: run.process.pid) -> int:
        """Keeps looking to the end of the run, after which nothing of it may be left. Kills the victim, by default
        the run, and raises Broken if that takes longer."""
        if self.look_until(time.monotonic() + within_s, run):
            os.kill(victim(run), signal.SIGKILL)
            run.process.wait()
            raise Broken(f"no end within {within_s:g} s: {run.ending()}")
        self.condemn(run)
        return run.process.returncode

    def settle(self) -> None:
        """Keeps looking until every run that was condemned has had its time."""
        while self._condemned:
            self.look()
            time.sleep(0.2)

    def _look_for_survivors(self, ours: dict[int, str]) -> None:
        now = time.monotonic()
        due = {run.mark for deadline, run in self._condemned if deadline <= now}
        self._condemned = [entry for entry in self._condemned if entry[0] > now]
        for pid, mark in ours.items():
            words = argv(pid)
            # Read again: it may have ended since the list was made.
            if mark in due and _mark(pid):
                self.left += 1
                self.faults.append(f"process {pid} outlived its run by {ENDED_WITHIN_S:g} s: {' '.join(words)[:200]}")
                send(pid, signal.SIGKILL)

    def _look_for_two_writers(self, ours: dict[int, str]) -> None:
        """Each process of a job has the job's lock as its standard input: the one open file that holds the lock."""
        for pid in ours:
            with contextlib.suppress(OSError):
                file = Path(os.readlink(f"/proc/{pid}/fd/0"))
                holds = "FLOCK" in Path(f"/proc/{pid}/fdinfo/0").read_text()
                if file.name == "lock" and file.parent.parent.name == "jobs" and not holds:
                    self.faults.append(f"process {pid} writes to {file.parent}, whose lock another supervisor holds")


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _mark(pid: int) -> str | None:
    mark = variable(pid, MARK)
    return mark if mark and mark.startswith(f"{os.getpid()}-") else None
