"""Faults inside the program that trains: Python imports this first where this folder is on PYTHONPATH."""

import atexit
import os
import sys
import threading
import time
from pathlib import Path


def _leave_after_a_checkpoint() -> None:
    job = Path(sys.argv[-1])
    while not any(job.glob("checkpoints/checkpoint-*")):
        time.sleep(0.01)
    if not (job / "left-early").exists():
        (job / "left-early").touch()
        os._exit(0)


if "training.programs.fit" in sys.orig_argv and "training.programs.accelerate_launch" not in sys.orig_argv:
    match os.environ.get("FINETUNE_FAULT"):
        case "abort-at-exit":
            atexit.register(os.abort)
        case "exit-0-early":
            threading.Thread(target=_leave_after_a_checkpoint, daemon=True).start()
