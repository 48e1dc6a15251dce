"""How long the command takes to find that there is nothing to do."""

from __future__ import annotations

import statistics
import time

from tests.benchmarks.orchestration import finished_project
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.flows.small import finetune

ROUNDS = 5


def measure(subject: Subject) -> list[Row]:
    """Wall seconds of `finetune run` and `finetune plan` on a recipe that has run."""
    project = finished_project(subject.folder)
    rows = []
    for name in ("run", "plan"):
        walls_s = []
        for _ in range(ROUNDS):
            began = time.monotonic()
            done = finetune(project.home, name, str(project.file))
            walls_s.append(time.monotonic() - began)
            if done.returncode != 0 or "Nothing changed" not in done.stdout:
                raise RuntimeError(done.stdout + done.stderr)
        how = f"the whole command, median of {ROUNDS}, no file changed; {min(walls_s):.2f} to {max(walls_s):.2f} s"
        rows.append(Row(f"nothing changed: `finetune {name}`", statistics.median(walls_s), how, unit="s", most=2.0))
    return rows
