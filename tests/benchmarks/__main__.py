"""`python -m tests.benchmarks`: measures, and prints one table of figures against their budgets.

Without options it needs nothing but the project: rows and model are made up. With --data and --model it measures
on those, and with --peer also against that script, called as
`SCRIPT --model DIR --data DIR --epochs N --lr F --seed N --batch N --max-length N --out DIR`, whose last line
is JSON with train_samples_per_second and accuracy. With --sets, each task type is trained on real rows, some tens of
minutes: tests/benchmarks/task_types.py; few-labels trains on a few rows of each label.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tasks.environment_variables import prepare_environment
from tests.benchmarks import (
    batches,
    checkpoints,
    cluster,
    cold,
    embeddings,
    example_memory,
    exports,
    few_labels,
    goodput,
    images,
    kill,
    nights,
    orchestration,
    peer,
    rows,
    scale,
    serve,
    shared_store,
    signatures,
    starts,
    step,
    sweep,
    task_types,
    teacher,
    tokenization,
)
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row, machine, markdown

BENCHMARKS: dict[str, Callable[[Subject], list[Row]]] = {
    "step": step.measure,
    "peer": peer.measure,
    "rows": rows.measure,
    "tokenization": tokenization.measure,
    "images": images.measure,
    "batches": batches.measure,
    "orchestration": orchestration.measure,
    "starts": starts.measure,
    "cold": cold.measure,
    "scale": scale.measure,
    "shared-store": shared_store.measure,
    "signatures": signatures.measure,
    "cluster": cluster.measure,
    "checkpoints": checkpoints.measure,
    "kill": kill.measure,
    "examples": example_memory.measure,
    "exports": exports.measure,
    "embeddings": embeddings.measure,
    "serve": serve.measure,
    "sweep": sweep.measure,
    "nights": nights.measure,
    "goodput": goodput.measure,
    "teacher": teacher.measure,
    "task-types": task_types.measure,
    "few-labels": few_labels.measure,
}


def main() -> int:
    """Prints the table; 1 where a benchmark failed (a missed budget is a figure, no failure)."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure against the budgets.")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model folder to train, in place of a made-up one")
    parser.add_argument("--data", type=Path, metavar="DIR", help="train.parquet and validation.parquet: text, label")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="a training script to compare with")
    parser.add_argument("--sets", type=Path, metavar="DIR", help="folders of rows for recipes/, trained with --model")
    parser.add_argument("--documents", type=int, default=100_000, metavar="N", help="for embeddings (default: 100,000)")
    parser.add_argument("--images", type=int, default=2_000, metavar="N", help="for images (default: 2,000)")
    parser.add_argument("--nights", type=int, default=20, metavar="N", help="for nights (default: 20)")
    parser.add_argument("--minutes", type=float, default=3.0, metavar="N", help="of each goodput (default: 3)")
    options = parser.parse_args()
    if options.peer and not (options.model and options.data):
        parser.error("--peer trains --model on --data: name both")
    if options.sets and not options.model:
        parser.error("--sets trains --model: name both")
    if options.nights < nights.LEAST:
        parser.error(f"--nights: at least {nights.LEAST}, so that there are early and late ones")
    prepare_environment()
    figures, failed = [], False
    with tempfile.TemporaryDirectory(prefix="finetune-benchmarks-") as folder:
        _isolate(Path(folder))
        given = (options.model, options.data, options.peer, options.sets)
        sizes = (options.documents, options.images, options.nights, options.minutes)
        subject = Subject(Path(folder), *given, *sizes)
        for name in options.only:
            began = time.monotonic()
            print(f"{name} …", end=" ", file=sys.stderr, flush=True)
            try:
                figures += BENCHMARKS[name](subject)
            except Exception:
                failed = True
                traceback.print_exc()
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    print(f"{machine()}.\n\n{markdown(figures)}")
    return 1 if failed else 0


def _isolate(folder: Path) -> None:
    """Nothing of the user's servers and settings is used, and nothing is left behind."""
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    os.environ.update(
        FINETUNE_HOME=str(folder / "home"),
        HF_HUB_OFFLINE="1",
        PREFECT_HOME=str(folder / "prefect"),
        PREFECT_RESULTS_LOCAL_STORAGE_PATH=str(folder / "results"),
    )


if __name__ == "__main__":
    sys.exit(main())
