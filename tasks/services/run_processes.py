"""The processes of flow runs on this machine. Standard library only: the container's first process imports it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from training.jobs.processes import descendants, send, start_ticks, variable

FLOW_RUN = "PREFECT__FLOW_RUN_ID"
RUNS_STOP_S = 40.0
TICK_S = 0.2


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
        time.sleep(TICK_S)
