"""A world in a bottle: the code of stores, locks, leases and ledgers against a simulated clock, disk, bucket and
scheduler.

    python -m tests.simulate [--seeds 1000] [--seed N [--steps]] [--scene NAME ...] [--digests [--alone]] [--mutations]

`--seed` plays one seed, and prints its steps if it breaks a promise: the same ones each time. `--digests` prints a
digest of each seed's steps; with `--alone`, a process of its own plays each seed. `--mutations` plants one
mistake after the other, and reports after how many seeds and seconds it is found. The exit status is 1 if a promise was
broken, or a planted mistake was not found.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is part of a seed's steps
    argv = [sys.executable, "-m", "tests.simulate", *sys.argv[1:]]
    os.execve(sys.executable, argv, {**os.environ, "PYTHONHASHSEED": "0"})

os.environ.update(AWS_ACCESS_KEY_ID="simulated", AWS_SECRET_ACCESS_KEY="simulated", XDG_STATE_HOME="/simulated/none")

from tests.simulate.mutations import MUTATIONS
from tests.simulate.seeds import SCENES, play_seed

MOST_SEEDS, MOST_S = 2000, 180.0
"""The budget for one planted mistake, in processor time."""


def main() -> int:
    """The command line."""
    options = _options()
    if options.seed is not None:
        return _replay(options.scene, options.seed, options.steps)
    if options.mutations:
        return _plant(options.only)
    if options.digests:
        return _list_digests(options.scene, options.first, options.seeds, options.alone)
    return _play(options.scene, options.first, options.seeds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many, of each scene")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one, and print its steps if it breaks a promise")
    parser.add_argument("--steps", action="store_true", help="print the steps of --seed in any case")
    parser.add_argument("--digests", action="store_true", help="print the digest of each seed's steps")
    parser.add_argument("--alone", action="store_true", help="with --digests: each seed in a process of its own")
    parser.add_argument("--mutations", action="store_true", help="plant mistakes, and find each")
    parser.add_argument("--only", default="", help="the mistakes with this text in their names")
    parser.add_argument("--scene", nargs="+", choices=SCENES, default=[*SCENES])
    return parser.parse_args()


def _replay(scenes: list[str], seed: int, shows_steps: bool) -> int:
    failed = False
    for scene in scenes:
        world = play_seed(scene, seed, trace=True)
        failed |= world.violation is not None
        if world.violation or shows_steps:
            for time_s, who, what in world.trace or ():
                print(f"{time_s:12.4f}  {who:22} {what}")
        if world.violation:
            traceback.print_exception(world.violation)
        print(f"{scene}: seed {seed}, {world.steps} steps: {world.violation or 'no promise was broken'}")
    return int(failed)


def _list_digests(scenes: list[str], first: int, seeds: int, alone: bool) -> int:
    for scene in scenes:
        for seed in range(first, first + seeds):
            if alone and (child := os.fork()):
                if os.waitpid(child, 0)[1]:
                    return 1
                continue
            print(f"{scene}: seed {seed}: {play_seed(scene, seed).digest}", flush=True)
            if alone:
                os._exit(0)
    return 0


def _play(scenes: list[str], first: int, seeds: int) -> int:
    failed = 0
    for scene in scenes:
        counts, steps, started = Counter[str](), 0, time.process_time()
        for seed in range(first, first + seeds):
            world = play_seed(scene, seed)
            counts.update(world.counts)
            steps += world.steps
            if world.violation:
                failed += 1
                print(f"{scene}: seed {seed}: {world.violation}", flush=True)
        took_s = time.process_time() - started
        shown = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
        print(
            f"{scene}: {seeds:,} seeds, {steps:,} steps, {seeds / took_s * 60:,.0f} seeds a minute; {shown}", flush=True
        )
    print(f"{failed} seeds broke a promise." if failed else "No promise was broken.")
    return int(failed > 0)


def _plant(only: str) -> int:
    print(f"| {'planted mistake':52} | seeds | seconds | found as |\n|---|---|---|---|", flush=True)
    missed = 0
    for name, (scene, plant) in MUTATIONS.items():
        if only not in name:
            continue
        started, violation = time.process_time(), None
        with plant():
            for seed in range(MOST_SEEDS):
                violation = play_seed(scene, seed).violation
                took_s = time.process_time() - started
                if violation or took_s > MOST_S:
                    break
        missed += violation is None
        print(f"| {name:52} | {seed + 1:5} | {took_s:7.1f} | {str(violation or 'not found')[:110]} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
