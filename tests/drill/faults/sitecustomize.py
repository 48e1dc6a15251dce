"""Faults inside the program that trains: Python imports this first where this folder is on PYTHONPATH.

The program may be a process of its own or a fork of the fork server, so each process waits until it is the one.
"""

import atexit
import os
import sys
import threading
import time
from pathlib import Path


def _leave_after_a_checkpoint() -> None:
    folder = Path(sys.argv[-1])  # of the job, or of a program that starts before its job is known
    while not (found := [*folder.glob("checkpoints/checkpoint-*"), *folder.glob("job/checkpoints/checkpoint-*")]):
        time.sleep(0.01)
    job = found[0].parents[1]
    if not (job / "left-early").exists():
        (job / "left-early").touch()
        os._exit(0)


def _abort() -> None:
    home = Path(sys.argv[-1]).parents[1]  # HOME/jobs/KEY, or HOME/waiting/ID
    (home / "aborted-at-exit").touch()
    os.abort()


_FAULTS = {"abort-at-exit": lambda: atexit.register(_abort), "exit-0-early": _leave_after_a_checkpoint}


def _wait_for_the_program() -> None:
    while Path(*sys.argv[:1]).parts[-3:] != ("training", "programs", "fit.py"):
        time.sleep(0.05)
    _FAULTS[os.environ["FINETUNE_FAULT"]]()


def _begin() -> None:
    threading.Thread(target=_wait_for_the_program, daemon=True).start()


if os.environ.get("FINETUNE_FAULT") in _FAULTS:
    _begin()
    os.register_at_fork(after_in_child=_begin)
