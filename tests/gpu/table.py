"""The table and the JSON file of `make gpu`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.cases import Result


@dataclass(frozen=True)
class Row:
    """One case and its outcome."""

    case: str
    result: Result | None
    """None if it was not tried."""
    reason: str = ""
    """Why it was not tried."""
    seconds: float = 0.0

    @property
    def state(self) -> str:
        if self.result is None:
            return "not tried"
        if self.result.refused:
            return "refused"
        return "yes" if self.result.holds else "no"

    def line(self) -> str:
        """The row in one line of text."""
        details = self.details()
        return f"{self.case}: {self.state}{f' ({details})' if details else ''}, {self.seconds:.0f} s"

    def details(self) -> str:
        """The checks that do not hold, and the figures."""
        if self.result is None or self.result.refused:
            return self.reason or (self.result.refused if self.result else "")
        failed = [f"{name}: {found}" for name, found in self.result.checks.items() if not found.startswith("yes")]
        return "; ".join([*failed, *(f"{name} {_number(value)}" for name, value in self.result.figures.items())])


def markdown(rows: Sequence[Row]) -> str:
    """A line for each case that was tried; then the reasons of the others, each with its cases."""
    lines = ["| case | holds | checks | figures and reasons | s |", "|---|---|---|---|---|"]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.result is None:
            reasons.setdefault(row.reason, []).append(row.case)
            continue
        kept = ", ".join(name for name, found in row.result.checks.items() if found.startswith("yes"))
        state = "**no**" if row.state == "no" else row.state
        cells = [row.case, state, kept, row.details(), f"{row.seconds:.0f}"]
        lines.append(f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
    shown = lines if len(lines) > 2 else []
    if reasons:
        shown += ["", "Not tried:", ""]
        shown += [f"- {reason} ({len(cases)} cases): {', '.join(cases)}" for reason, cases in reasons.items()]
    return "\n".join(shown)


def write(file: Path, machine: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes all rows and the description of the machine as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    cases = [{**asdict(row), "state": row.state} for row in rows]
    file.write_text(json.dumps({"machine": machine, "cases": cases}, indent=1) + "\n")


def _number(value: float | int | str) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
