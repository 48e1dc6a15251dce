"""`make matrix`: every engine with every strategy, really launched, and what holds of each, as a table in the README.

    python -m tests.matrix [--only ENGINE-STRATEGY-PROCESSES ...]

Each cell is a training of the made-up rows of tests/training/tiny.py by the command that the stage fit launches. One
is left alone; another is killed again and again, and must end with the same bytes. Where the recipe refuses the
combination, the table says so. The exit status is 1 where something does not hold.

Without --only, what came of it is kept in tests/matrix/result.json and replaces the README's table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

# Read when the libraries are imported, and passed on to the trainings. The models are too small for more threads.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DO_NOT_TRACK="1", HF_HUB_DISABLE_PROGRESS_BARS="1")


def main() -> int:
    """The command line."""
    from tests.matrix.cells import COMBINATIONS, Cell, fill
    from tests.matrix.table import Result
    from tests.training.tiny import make_world

    names = [combination.name for combination in COMBINATIONS]
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="Engines and strategies.")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ENGINE-STRATEGY-PROCESSES")
    only = parser.parse_args().only
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="finetune-matrix-") as folder:
        world = make_world(Path(folder) / "world")
        for combination in COMBINATIONS:
            if combination.name in only:
                cells.append(fill(combination, world, Path(folder) / combination.name))
                told = cells[-1].refused or ", ".join(f"{name}: {found}" for name, found in cells[-1].promises.items())
                print(f"{combination.name}: {told}", flush=True)
    if only == names:
        Result.of(cells).keep()
    return 0 if all(cell.holds for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
