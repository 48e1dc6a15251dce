"""`finetune runs [RECIPE]`: what has run, newest first: state, the figure that is judged, verdict and version."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from flows.cli.arguments import add_json_argument, need_writable
from flows.cli.codes import COMPLETED
from flows.reports.tables import aligned, terminal_width
from tasks.tracking.reports import format_score, format_value
from tasks.tracking.run_list import list_runs
from training.jobs.protocol import write_atomically
from training.problems import Problem, UserError

LIMIT = 20
HEAD = ["run", "recipe", "started, UTC", "time", "state", "verdict", "version", "judged by"]
RECIPE = 1
NARROWEST = 12


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser
    parser = commands.add_parser("runs", help="list runs with their figures", description=__doc__)
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="runs of this recipe (default: of all)")
    parser.add_argument("--limit", metavar="N", type=int, default=LIMIT, help="how many runs (default: %(default)s)")
    add_json_argument(parser, "all that is known of them")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints a line a run. Raises UserError for a recipe that has not run."""
    need_writable(arguments.json)
    if arguments.limit < 1:
        message = f"{arguments.limit} is not a number of runs: give 1 or more."
        raise UserError([Problem(kind="option", where="--limit", message=message)])
    runs = list_runs(arguments.recipe, arguments.limit)
    if arguments.json is not None:
        write_atomically(arguments.json.absolute(), f"{json.dumps(runs, indent=2, ensure_ascii=False)}\n".encode())
    print(*(_lines(runs, terminal_width()) if runs else ["Nothing has run yet."]), sep="\n")
    return COMPLETED


def _lines(runs: list[dict[str, Any]], width: int) -> list[str]:
    """A line a run; where they are wider than that, without intervals, and with the beginnings of recipes' names."""
    for interval in (True, False):
        table = [HEAD, *(_cells(run, interval) for run in runs)]
        over = max(map(len, aligned(table))) - width
        if over <= 0:
            break
    longest = max(max(len(line[RECIPE]) for line in table) - max(over, 0), NARROWEST)
    return aligned([[*line[:RECIPE], _cut(line[RECIPE], longest), *line[RECIPE + 1 :]] for line in table])


def _cells(run: Mapping[str, Any], interval: bool) -> list[str]:
    judged, seconds = run["judged"], run["seconds"]
    return [
        run["flow_run_id"][:8],
        run["recipe"],
        f"{datetime.fromtimestamp(run['started_ms'] / 1000, UTC):%m-%d %H:%M}",
        "" if seconds is None else f"{seconds:,.0f} s",
        run["state"],
        run["verdict"] or "",
        run["version"] or "",
        f"{judged['metric']} {format_score(judged) if interval else format_value(judged['value'])}" if judged else "",
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
