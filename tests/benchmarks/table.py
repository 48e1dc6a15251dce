"""One measured figure a row, as Markdown, under the machine and the commit that they were measured on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tasks.jobs.hardware import mixed_precision

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Row:
    """One figure, and the budget that it is held against where it has one."""

    what: str
    value: float | str
    how: str
    """The measurement, its subject, and the figures that the value comes from."""
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the value keeps to its budget; None without one."""
        if self.least is None and self.most is None:
            return None
        value = float(self.value)
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def markdown(rows: Sequence[Row]) -> str:
    """The table, a line a row."""
    lines = ["| what | measured | budget | holds | how |", "|---|---|---|---|---|"]
    for row in rows:
        budget = " and ".join(
            f"{sign} {limit:g} {row.unit}".rstrip()
            for sign, limit in (("≥", row.least), ("≤", row.most))
            if limit is not None
        )
        holds = {True: "yes", False: "**no**", None: ""}[row.holds]
        cells = [row.what, _spelt(row.value, row.unit), budget, holds, row.how]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def _spelt(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f} {unit}".rstrip()


def machine() -> str:
    """The processor, its cores that may be used, what `auto` precision is on it, torch, and the commit."""
    processor = "an unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
    native = mixed_precision()
    return (
        f"{processor}, {len(os.sched_getaffinity(0))} cores, "
        f"{'32-bit floats only' if native == 'no' else f'computes in {native}'}; torch {version('torch')}; "
        f"commit {commit()}"
    )


def commit() -> str:
    """The commit that is checked out, `-dirty` where files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"
