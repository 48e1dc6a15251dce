"""The pipeline under fire: parts of it are killed at random instants, and what comes of it is compared.

    python -m tests.drill [--kills 20] [--seed N] [--processes 1,2] [--only kills|FIRE ...]

First the recipe of tests/flows/small.py runs undisturbed. Then runs of it get SIGKILL, each time to the flow, the
supervisor, the launcher or a rank, at an instant drawn from the whole of a run; the next run starts at once. What
each training ends with must be what the undisturbed run ended with, no process may outlive its run, and MLflow must
have one closed run a flow run. Then come the fires of tests/drill/fires.py, by name. The exit status is 1 when
anything differed, was left over, or went wrong; then everything stays in a temporary folder for a look.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

# Read when the libraries are imported, and passed on to the runs.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PREFECT_SERVER_ANALYTICS_ENABLED="false", DO_NOT_TRACK="1")
os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", HF_HUB_DISABLE_TELEMETRY="1")
for name in ("FINETUNE_HOME", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
    os.environ.pop(name, None)


def main() -> int:
    """The command line."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="finetune-drill-"))
    os.environ["PREFECT_HOME"] = str(folder / "prefect")
    print(f"seed {options.seed}, {options.kills} kills, processes: {options.processes}, in {folder}", flush=True)
    if _drill(folder, options):
        print(f"What it left is in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


def _drill(folder: Path, options: argparse.Namespace) -> bool:
    """Whether anything went wrong."""
    from tasks.runtime.services import ensure_prefect_server
    from tests.drill.fires import FIRES, Fires
    from tests.drill.ground import Ground
    from tests.drill.kills import Kills, random_kills, undisturbed
    from tests.drill.report import summary
    from tests.drill.watch import Watch

    began = time.monotonic()
    ground, watch = Ground(folder, ensure_prefect_server()), Watch()
    whole, homes = {}, {}
    for processes in options.processes:
        whole[processes], homes[processes] = undisturbed(ground, processes)
        told = f"{whole[processes].seconds:.1f} s, sha256 of the weights {whole[processes].left.model}"
        print(f"undisturbed, processes: {processes}: {told}", flush=True)
    with_kills = "kills" in options.only
    kills = random_kills(ground, watch, whole, options.kills, options.seed) if with_kills else Kills()
    most = max(whole)
    fires = Fires(ground, watch, whole[most].left, homes[most], most)
    for name in FIRES:
        if name in options.only:
            fires.light(name)
    watch.settle()
    print(*summary(kills, fires.told, watch, time.monotonic() - began), sep="\n", flush=True)
    return bool(kills.faults or fires.faults or watch.faults)


def _options() -> argparse.Namespace:
    from tests.drill.fires import FIRES

    parser = argparse.ArgumentParser(prog="python -m tests.drill", description="The pipeline under fire.")
    parser.add_argument("--kills", type=int, default=20, help="how many random kills (default: 20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="draws them")
    parser.add_argument("--processes", type=_numbers, default=[1, 2], help="that train, in turns: 1,2")
    everything = ["kills", *FIRES]
    parser.add_argument("--only", nargs="+", choices=everything, default=everything, help="kills, or fires by name")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
