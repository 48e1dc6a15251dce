"""`python -m tests.labels`: simulates homes with planted wrong labels, and prints how often the interval of the share
of errors in the list covers the truth."""

from __future__ import annotations

import argparse
import sys

from tests.benchmarks.table import machine
from tests.labels.regimes import REGIMES, simulate


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.labels", description="Simulate wrong labels.")
    parser.add_argument("--homes", type=int, default=200, help="for each regime")
    parser.add_argument("--regimes", default="", metavar="WORD", help="only regimes with this word")
    options = parser.parse_args()
    print(f"{machine()}. {options.homes:,} homes a regime.\n")
    columns = ("regime", "interval covers", "bare list covers", "rows listed", "true share", "expected", "interval")
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    for name, regime in REGIMES.items():
        if options.regimes in name:
            found = simulate(regime, options.homes)
            cells = [f"{count / found.homes:.1%}" for count in (found.covered, found.bare_covered)]
            cells += [f"{found.listed:,.0f}", f"{found.truth:.0%}", f"{found.expected:.0%}"]
            print(f"| {name} | {' | '.join(cells)} | {found.low:.0%} to {found.high:.0%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
