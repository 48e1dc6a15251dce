"""List runs, newest first, with state, judged metric, verdict and version."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from flows.cli.shared import COMPLETED, add_json_argument, add_limit_argument, write_json
from flows.reports.tables import align, fit_to_terminal
from tasks.reports.formatting import format_score
from tasks.tracking.mlflow_run import list_runs

HEAD = ["run", "recipe", "started, UTC", "time", "state", "verdict", "version", "judged by"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="only runs of this recipe")
    add_limit_argument(parser, "how many")
    add_json_argument(parser, "the list, with ids and intervals in full,")


def execute(arguments: argparse.Namespace) -> int:
    """Prints a line for each run. Raises UserError for a recipe that has no run."""
    runs = list_runs(arguments.recipe, arguments.limit)
    write_json(arguments.json, runs)
    lines = align([HEAD, *map(_cells, runs)]) if runs else ["There is no run yet."]
    print(*fit_to_terminal(lines), sep="\n")
    return COMPLETED


def _cells(run: Mapping[str, Any]) -> list[str]:
    judged, seconds = run["judged"], run["seconds"]
    return [
        run["flow_run_id"][:8],
        " ".join(filter(None, [run["recipe"], run["part"]])),
        f"{datetime.fromtimestamp(run['started_ms'] / 1000, UTC):%m-%d %H:%M}",
        "" if seconds is None else f"{seconds:,.0f} s",
        run["state"],
        run["verdict"] or "",
        run["version"] or "",
        f"{judged['metric']} {format_score(judged)}" if judged else "",
    ]
