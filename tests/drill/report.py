"""The summary of a drill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tasks.reports.stage_summaries import STAGES
from tests.drill.kills import PARTS, Kills
from tests.drill.watch import Watch

VICTIMS = [*PARTS, "program"]


def summary(kills: Kills, fires: Mapping[str, str], watch: Watch, seconds: float) -> list[str]:
    """Lines: the kills by victim, stage and way of training, the fires, and what went wrong."""
    lines = [""]
    if kills.by_stage:
        lines += ["kills by stage", *table(kills.by_stage, VICTIMS, ["start", *list(STAGES)[1:], "end"])]
        lines += ["kills by way of training"]
        lines += table(kills.by_way, VICTIMS, sorted({down for _, down in kills.by_way}))
        for count, times in sorted(Counter(kills.given_up).items()):
            lines += [f"given up after {count} kills: {times} time" + "s" * (times > 1)]
    if fires:
        lines += ["fires", *(f"  {name:<20} {result.splitlines()[0]}" for name, result in fires.items())]
    total, held = sum(kills.by_stage.values()), [*kills.faults, *watch.faults]
    lines += [*(f"FAULT  {fault.splitlines()[0]}" for fault in held), ""]
    lines += [
        f"{total} kills in {kills.runs} runs of {kills.trainings} trainings, {len(fires)} fires, {seconds:.0f} s: "
        f"{kills.differences} differences, {watch.left} processes left, "
        f"{len(held) + sum(result.startswith('FAULT') for result in fires.values())} faults in all"
    ]
    return lines


def table(counts: Counter[tuple[str, str]], across: list[str], down: list[str]) -> list[str]:
    """Lines of a table of counts by (across, down), with sums and without empty rows."""
    rows = [[name, *(counts[column, name] for column in across)] for name in down]
    rows = [[*row, sum(row[1:])] for row in rows if any(row[1:])]
    sums = [sum(row[i] for row in rows) for i in range(1, len(across) + 2)]
    cells = [[str(cell or "") for cell in line] for line in (["", *across, "all"], *rows, ["all", *sums])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
