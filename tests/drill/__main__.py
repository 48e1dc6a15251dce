"""The pipeline under fire: parts of it are killed at random instants, and what comes of it is compared.

    python -m tests.drill [--kills 20] [--faults 30] [--seed N] [--ways 1 2 loop random fsdp zero2 zero3]
                          [--only kills|store|predict|cluster|slurm|sweep|NAME ...]

First the recipe of tests/flows/small.py runs undisturbed, in each of the ways of tests/drill/ground.py. Then runs of it
get SIGKILL, each time to the flow, the fork server, the supervisor, the launcher or a rank, at an instant drawn from
the whole of a run; the next run starts at once. What each training ends with must be what the undisturbed run ended
with, no process may outlive its run, and MLflow must have one closed run a flow run; the state check
(training/engine/state_check.py) covers each resume. Then come the fires of tests/drill/fires.py, the faults of a shared
store in tests/drill/store.py, those of a cluster in tests/drill/cluster.py, Slurm in tests/drill/slurm.py, the kills
of sweeps in tests/drill/sweep.py, and the scenes of tests/drill/scenes.py. The exit status is 1 when anything differed,
was left over, or went wrong; then everything stays in a temporary folder for a look.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.drill.ground import Ground
    from tests.drill.kills import Kills
    from tests.drill.watch import Watch

# Read when the libraries are imported, and passed on to the runs.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PREFECT_SERVER_ANALYTICS_ENABLED="false", DO_NOT_TRACK="1")
os.environ.update(FINETUNE_STATE_CHECK="1", MLFLOW_DISABLE_TELEMETRY="true", HF_HUB_DISABLE_TELEMETRY="1")
for name in ("FINETUNE_HOME", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
    os.environ.pop(name, None)


def main() -> int:
    """The command line."""
    options = _options()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    folder = Path(tempfile.mkdtemp(prefix="finetune-drill-"))
    os.environ["PREFECT_HOME"] = str(folder / "prefect")
    print(f"seed {options.seed}, {options.kills} kills, ways: {options.ways}, in {folder}", flush=True)
    if _drill(folder, options):
        print(f"What it left is in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


def _drill(folder: Path, options: argparse.Namespace) -> bool:
    """Whether anything went wrong."""
    from tests.drill.kills import Kills
    from tests.drill.report import summary
    from tests.drill.scenes import SCENES, play
    from tests.drill.watch import Watch

    began, watch, kills, results = time.monotonic(), Watch(), Kills(), dict[str, str]()
    if set(options.only) - SCENES.keys() - {"store", "predict", "cluster", "slurm", "sweep"}:
        kills, results = _under_fire(_ground(folder), options, watch)
    if "store" in options.only:
        results |= _store_faults(_ground(folder / "store"), options, watch)
    if "predict" in options.only:
        results |= _predict_faults(_ground(folder / "predict"), options, watch)
    if "cluster" in options.only:
        results |= _cluster_faults(_ground(folder / "cluster"), options, watch)
    if "slurm" in options.only:
        results |= _slurm(_ground(folder / "slurm"), watch)
    if "sweep" in options.only:
        results |= _sweep_kills(_ground(folder / "sweep", ()), options, watch)
    results |= {name: play(name, folder) for name in SCENES if name in options.only}
    watch.settle()
    print(*summary(kills, results, watch, time.monotonic() - began), sep="\n", flush=True)
    return bool(kills.faults or watch.faults or any(one.startswith("FAULT") for one in results.values()))


def _ground(folder: Path, settings: Sequence[str] | None = None) -> Ground:
    """A place for runs, which have homes of their own and share a Prefect server. `settings`: see Ground."""
    from tasks import servers
    from tasks.services.prefect_server import ensure_prefect_server
    from tests.drill.ground import Ground

    os.environ.setdefault("FINETUNE_HOME", str(folder / "home-of-the-server"))  # of the first ground: the server is one
    os.environ["PREFECT_API_AUTH_STRING"] = servers.auth_string()
    server = ensure_prefect_server()
    return Ground(folder, server) if settings is None else Ground(folder, server, settings)


def _store_faults(ground: Ground, options: argparse.Namespace, watch: Watch) -> dict[str, str]:
    """The result of each fault of a shared store."""
    from tests.drill.store import StoreFaults

    faults = StoreFaults(ground, watch, options.seed)
    for number in options.numbers or range(1, options.faults + 1):
        faults.play(number)
    return faults.results


def _predict_faults(ground: Ground, options: argparse.Namespace, watch: Watch) -> dict[str, str]:
    """The result of each fault of batch predictions: at least so many faults, and so many kills."""
    from tests.drill.predict import PredictFaults

    faults = PredictFaults(ground, watch, options.seed)
    for number in options.numbers or itertools.count(1):
        faults.play(number)
        if not options.numbers and number >= options.faults and faults.kills >= options.kills:
            break
    print(f"{faults.kills} kills of batch predictions", flush=True)
    return faults.results


def _cluster_faults(ground: Ground, options: argparse.Namespace, watch: Watch) -> dict[str, str]:
    """The result of each fault of a cluster."""
    from tests.drill.cluster import FAULTS, ClusterFaults
    from tests.drill.hosts import why_not

    if reason := why_not():
        return {"cluster": f"skipped: {reason}"}
    with ClusterFaults(ground, watch, options.seed) as faults:
        faults.undisturbed()
        for number, name in enumerate(FAULTS, 1):
            if number in (options.numbers or [number]):
                faults.play(name)
    return faults.results


def _sweep_kills(ground: Ground, options: argparse.Namespace, watch: Watch) -> dict[str, str]:
    """The result of each sweep with kills on its way."""
    from tests.drill.sweep import SweepKills

    kills = SweepKills(ground, watch, options.seed)
    kills.play(options.kills)
    return kills.results


def _slurm(ground: Ground, watch: Watch) -> dict[str, str]:
    """What came of a training through Slurm."""
    from tests.drill import slurm
    from tests.drill.promises import judge

    return {"slurm": judge("slurm", lambda: slurm.play(ground, watch))}


def _under_fire(ground: Ground, options: argparse.Namespace, watch: Watch) -> tuple[Kills, dict[str, str]]:
    """The kills and the result of each fire, next to undisturbed runs."""
    from tests.drill.fires import FIRES, Fires
    from tests.drill.kills import Kills, random_kills, undisturbed

    whole, homes = {}, {}
    for way in options.ways:
        whole[way], homes[way] = undisturbed(ground, way)
        ending = f"{whole[way].seconds:.1f} s, sha256 of the weights {whole[way].left.model}"
        print(f"undisturbed, {way}: {ending}", flush=True)
    with_kills = "kills" in options.only
    kills = random_kills(ground, watch, whole, options.kills, options.seed) if with_kills else Kills()
    way = "2" if "2" in whole else options.ways[0]
    fires = Fires(ground, watch, whole[way].left, homes[way], way)
    for name in FIRES:
        if name in options.only:
            fires.light(name)
    return kills, fires.results


def _options() -> argparse.Namespace:
    from tests.drill.fires import FIRES
    from tests.drill.ground import WAYS
    from tests.drill.scenes import SCENES

    parser = argparse.ArgumentParser(prog="python -m tests.drill", description="The pipeline under fire.")
    parser.add_argument("--kills", type=int, default=20, help="how many random kills (default: 20)")
    parser.add_argument(
        "--faults", type=int, default=30, help="how many of the store, and of predictions (default: 30)"
    )
    parser.add_argument("--numbers", nargs="+", type=int, help="of the faults by number, only these")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="draws them")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="to train, in turns (default: all)")
    everything = ["kills", *FIRES, "store", "predict", "cluster", "slurm", "sweep", *SCENES]
    parser.add_argument(
        "--only", nargs="+", choices=everything, default=everything, help="kills, or fires and scenes by name"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
