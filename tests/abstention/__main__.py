"""`python -m tests.abstention`: simulates homes whose models leave some rows to a person, and prints how often the
bound on the errors of the answered rows holds."""

from __future__ import annotations

import argparse
import sys

from tests.abstention.regimes import CONFIDENCE, MAX_ERROR, REGIMES
from tests.benchmarks.table import machine


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.abstention", description="Simulate abstaining models.")
    parser.add_argument("--homes", type=int, default=1_000, help="for each regime")
    parser.add_argument("--regimes", default="", metavar="WORD", help="only regimes with this word")
    options = parser.parse_args()
    print(f"{machine()}. max_error {MAX_ERROR:g}, confidence {CONFIDENCE:g}, {options.homes:,} homes a regime.\n")
    columns = ("regime", "rows: validation, test", "bound holds", "without it", "some answered", "answered", "possible")
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    for name, regime in REGIMES.items():
        if options.regimes in name:
            found = regime.homes(options.homes)
            shares = (found.held, found.naive_held, found.with_threshold)
            cells = " | ".join(f"{count / found.homes:.1%}" for count in shares)
            rows = f"{regime.validation:,}, {regime.test:,}"
            print(f"| {name} | {rows} | {cells} | {found.answered:.0%} | {found.possible:.0%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
