"""`finetune models [NAME]`: what is registered, newest first, and who made which version champion, when and why."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from flows.cli.arguments import add_json_argument, need_writable
from flows.cli.codes import COMPLETED
from flows.reports.tables import aligned, terminal_width
from tasks.registry.catalog import list_models
from tasks.tracking.reports import format_value
from training.jobs.protocol import write_atomically

NARROWEST = 12


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("models", help="list registered models", description=__doc__)
    parser.add_argument("name", metavar="NAME", nargs="?", help="one registered model (default: all)")
    add_json_argument(parser, "all that is known of them")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints a table a model. Raises UserError for a model that is not there."""
    need_writable(arguments.json)
    models = list_models(arguments.name)
    if arguments.json is not None:
        write_atomically(arguments.json.absolute(), f"{json.dumps(models, indent=2, ensure_ascii=False)}\n".encode())
    width = terminal_width()
    blocks = [["\n".join([model["name"], *_version_lines(model["versions"], width)])] for model in models]
    for block, model in zip(blocks, models, strict=True):
        if arguments.name and model["moves"]:
            block.append("\n".join(_move_lines(model["moves"], width)))
    print("\n\n".join(text for block in blocks for text in block) or "Nothing is registered yet.")
    return COMPLETED


def _version_lines(versions: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """A line a version, cut to the width: its figures and its data share what the other columns leave."""
    lines = [["version", "aliases", "date", "verdict", "figures", "data"]]
    for version in versions:
        aliases = ", ".join(version["aliases"])
        date = datetime.fromtimestamp(version["registered_ms"] / 1000, UTC).date().isoformat()
        data = " ".join(filter(None, [version["data"] or "", (version["data_commit"] or "")[:7]]))
        lines.append([version["version"], aliases, date, version["verdict"] or "", _figures(version), data])
    fixed = sum(max(len(line[column]) for line in lines) + 2 for column in range(4))
    longest = [max(len(line[column]) for line in lines) for column in (4, 5)]
    room = max(width - 2 - fixed, 2 * NARROWEST)
    of_data = min(longest[1], max(room - longest[0] - 2, room // 3))
    widths = [room - of_data - 2, of_data]
    cut = [[*line[:4], _first_of(line[4], widths[0]), _end_of(line[5], widths[1])] for line in lines]
    return [f"  {line}" for line in aligned(cut)]


def _figures(version: Mapping[str, Any]) -> str:
    figures = version["figures"].get(version["split"], {})
    shown = ", ".join(f"{name} {format_value(figure['value'])}" for name, figure in figures.items())
    return f"{version['split']} {shown}" if shown else ""


def _first_of(listed: str, width: int) -> str:
    """As many of them as fit, each whole: the end of a number is not seen to be missing."""
    parts = listed.split(", ")
    while len(listed) > width and len(parts) > 1:
        parts = parts[:-1]
        listed = ", ".join([*parts, "…"])
    return listed


def _end_of(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def _move_lines(moves: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Each move of the champion's alias, newest first."""
    lines = []
    for move in reversed(moves):
        change = f"version {move['before']} → {move['to']}" if move["before"] else f"version {move['to']}"
        by = f"flow run {move['flow_run'][:8]}" if move["by"] == "run" else f"finetune {move['by']}"
        why = f": {move['why']}" if move["why"] else ""
        line = f"  {move['time'][:16].replace('T', ' ')} UTC  {change} by {by} of {move['user']} on {move['host']}{why}"
        lines += textwrap.wrap(line, width, subsequent_indent=" " * 24, break_long_words=False, break_on_hyphens=False)
    return lines
