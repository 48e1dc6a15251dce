"""`make matrix`: every engine and every task type with every strategy, today's architectures, and which promises hold
for each: docs/evidence/matrix.md.

    python -m tests.matrix [--only ENGINE|RECIPE[-STRATEGY[-PROCESSES]] | architectures[-NAME] ...]

Each cell is a training of a recipe of tests/task_types.py: engines by the command that the stage fit launches, task
types by forks of one process. One training is left alone; another is killed again and again, and must end with the
same bytes. Where a combination is refused, the table has the refusal. The exit status is 1 if a promise does not hold.

What came of the cells that were tried is kept in tests/matrix/result.json and shown in docs/evidence/matrix.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

# Read when the libraries are imported, and passed on to the trainings. The models are too small for more threads.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DO_NOT_TRACK="1", HF_HUB_DISABLE_PROGRESS_BARS="1")


def main() -> int:
    """The command line."""
    from tests import fork_server
    from tests.benchmarks.table import commit
    from tests.matrix.cells import COMBINATIONS, Cell, fill
    from tests.matrix.table import Result
    from tests.task_types import build_world, write_rows

    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="Engines, task types and strategies.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="how names of cells may begin")
    only, tried = parser.parse_args().only, commit()
    chosen = [one for one in COMBINATIONS if any(f"{one.name}-".startswith(f"{name}-") or not name for name in only)]
    if not chosen:
        parser.error(f"there is no such cell: choose from {', '.join(one.name for one in COMBINATIONS)}.")
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="finetune-matrix-") as folder:
        Path(folder, "forks").mkdir()
        fork_server.prepare(f"{folder}/forks")

        @cache
        def world(task: str, architecture: str) -> Path:
            home = Path(folder) / f"{task}{architecture}"
            rows = write_rows(task, home / "rows")
            (alike,) = [one for one in COMBINATIONS if (one.task, one.architecture) == (task, architecture)][:1]
            return build_world(alike.recipe(rows), home)

        for combination in chosen:
            place = world(combination.task, combination.architecture)
            cells.append(fill(combination, place, Path(folder) / combination.name, tried))
            Result.read().renewed(cells[-1:]).keep()
            result = cells[-1].refused or ", ".join(f"{name}: {found}" for name, found in cells[-1].promises.items())
            print(f"{combination.name}: {result}", flush=True)
    return 0 if all(cell.holds for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
