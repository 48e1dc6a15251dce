"""`python -m tests.gate`: simulates comparisons of models that are no better, and homes that train each night, and
prints how often the gate promotes."""

from __future__ import annotations

import argparse
import sys

import pytest

from tests.benchmarks.table import machine
from tests.gate.homes import HOMES, NIGHTS, TABLE
from tests.training.calibration import REGIMES, draw_once


def main() -> int:
    """Prints two tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.gate", description="Simulate the gate.")
    parser.add_argument("--trials", type=int, default=1_000, help="for each regime")
    parser.add_argument("--regimes", default="", metavar="WORD", help="only regimes with this word")
    parser.add_argument("--homes", type=int, default=HOMES)
    parser.add_argument("--only", nargs="+", choices=("regimes", "homes"), default=("regimes", "homes"))
    options = parser.parse_args()
    print(f"{machine()}.\n")
    if "homes" in options.only:
        print(f"| home | of {options.homes} homes, promote one in {NIGHTS} nights |\n|---|---|")
        for name, home in TABLE.items():
            print(f"| {name} | {sum(map(home.promotes, range(options.homes)))} |", flush=True)
        print()
    if "regimes" in options.only:
        print(f"| regime | of {options.trials:,} models that are no better, promoted |\n|---|---|")
        with pytest.MonkeyPatch.context() as patch:
            draw_once(patch)
            for name, regime in REGIMES.items():
                if options.regimes in name:
                    print(f"| {name} | {regime.false_promotions(options.trials) / options.trials:.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
