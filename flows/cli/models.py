"""List registered models, newest version first.

With NAME, also lists each change of its champion: when, by whom and why.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from flows.cli.shared import COMPLETED, add_json_argument, add_limit_argument, write_json
from flows.reports.tables import align, fit_to_terminal, terminal_width, wrap
from tasks.registry.catalog import list_models
from tasks.reports.formatting import format_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="only this registered model")
    add_limit_argument(parser, "how many versions of a model")
    add_json_argument(parser, "the list, with intervals and digests,")


def execute(arguments: argparse.Namespace) -> int:
    """Prints a table for each model. Raises UserError for an unknown model."""
    models = list_models(arguments.name, arguments.limit)
    write_json(arguments.json, models)
    blocks = []
    for model in models:
        more = [f"  … and older versions: --limit {2 * arguments.limit}"] if model["has_more"] else []
        blocks.append([model["name"], *fit_to_terminal(_version_lines(model["versions"])), *more])
        if arguments.name and model["moves"]:
            blocks.append([line for move in reversed(model["moves"]) for line in _move_lines(move)])
    print("\n\n".join("\n".join(block) for block in blocks) or "Nothing is registered yet.")
    return COMPLETED


def _version_lines(versions: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [["version", "aliases", "date", "verdict", "metrics", "data"]]
    for version in versions:
        aliases = ", ".join(version["aliases"])
        date = datetime.fromtimestamp(version["registered_ms"] / 1000, UTC).date().isoformat()
        data = " ".join(filter(None, [version["data"] or "", (version["data_commit"] or "")[:7]]))
        scores = version["figures"].get(version["split"], {})
        values = ", ".join(f"{name} {format_value(score['value'])}" for name, score in scores.items())
        metrics = f"{version['split']} {values}" if values else ""
        lines.append([version["version"], aliases, date, version["verdict"] or "", metrics, data])
    return [f"  {line}" for line in align(lines)]


def _move_lines(move: Mapping[str, Any]) -> list[str]:
    """Formats a change of the champion: time, versions, author and reason."""
    change = f"version {move['before']} → {move['to']}" if move["before"] else f"version {move['to']}"
    by = f"flow run {move['flow_run'][:8]}" if move["by"] == "run" else f"finetune {move['by']}"
    why = f": {move['why']}" if move["why"] else ""
    start = f"  {move['time'][:16].replace('T', ' ')} UTC  "
    text = f"{change} by {by} of {move['user']} on {move['host']}{why}"
    return wrap(text, terminal_width(), start, " " * len(start))
