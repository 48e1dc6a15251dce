"""Show what fills the home, what needs it, and what can be removed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from flows.cli.shared import COMPLETED, option_error
from flows.reports.tables import align
from tasks.cache import garbage_collection, settings
from tasks.cache.garbage_collection import INCOMPLETE, JOBS, QUARANTINE, RECORDS, REMOVED, Piece, Sizes
from tasks.registry.retention import find_needs
from tasks.tracking.reports import format_size

# Listed after the artifacts of the stages.
LEFTOVERS = (JOBS, QUARANTINE, INCOMPLETE, REMOVED, RECORDS)
# Other parts of the home that grow.
OTHER_PARTS = ("runs", "services", "mlartifacts", "mlflow.db", "prefect")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--remove", action="store_true", help="remove what nothing needs, after a question")
    parser.add_argument("--yes", action="store_true", help="with --remove: do not ask")
    parser.add_argument(
        "--give-up",
        metavar="RUN",
        action="append",
        default=[],
        help="the id of a run, or its first digits, that needs nothing any more: it will not be resumed, MLflow shall "
        "not get the rest of it, or its version was deleted",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prints the tables; removes folders with --remove. Raises UserError while a run uses the home."""
    if arguments.yes and not arguments.remove:
        raise option_error("--yes", "needs --remove: add it, or leave this option out.")
    if arguments.remove and not arguments.yes and not sys.stdin.isatty():
        raise option_error("--remove", "needs a terminal for its question: add --yes.")
    if not settings.home_path().exists():
        print(f"{settings.home_path()} does not exist yet: nothing is stored.")
        return COMPLETED
    if arguments.remove:
        garbage_collection.require_no_run()
    measured = garbage_collection.measure(settings.home())  # while this process imports MLflow and reads the registry
    pieces = garbage_collection.find_pieces(find_needs(arguments.give_up))
    sizes = measured()
    print(*_format_tables(pieces, sizes), sep="\n")
    unneeded = [piece for piece in pieces if not piece.needed_by]
    if not unneeded:
        print("Nothing can go.")
        return COMPLETED
    size = format_size(sizes.of((piece.path for piece in unneeded), freed=True))
    if not arguments.remove:
        runs = ", ".join(run[:8] for run in garbage_collection.running_runs())
        print(f"{size} can go{f', after these runs have ended: {runs}' if runs else ''}: finetune store --remove")
        return COMPLETED
    if not arguments.yes and not _confirm(f"Remove {len(unneeded):,} of these, and free {size}? [y/N] "):
        print("Nothing was removed.")
        return COMPLETED
    paths = {piece.path for piece in unneeded}
    removed, freed = garbage_collection.remove(paths, lambda: find_needs(arguments.give_up))
    print(f"Removed {removed:,} of {len(unneeded):,}: {format_size(freed)} freed.")
    return COMPLETED


def _confirm(question: str) -> bool:
    try:
        return input(question).strip().lower() == "y"
    except EOFError:
        print()
        return False


def _format_tables(pieces: Sequence[Piece], sizes: Sizes) -> Iterator[str]:
    """Formats a table of the home's parts, and one of the runs and versions that need them."""
    home = settings.home()
    yield f"{home}: {format_size(sizes.of([home]))}"
    yield ""
    yield from align([["what", "number", "size", "needed", "can go", "frees"], *_part_rows(pieces, sizes)])
    owners = dict.fromkeys(owner for piece in pieces for owner in piece.needed_by)
    table = [["needed by", "artifacts", "jobs", "size"]]
    for owner in owners:
        owned = [piece for piece in pieces if owner in piece.needed_by]
        jobs = sum(piece.sort == JOBS for piece in owned)
        table.append([owner, f"{len(owned) - jobs:,}", f"{jobs:,}", _format_sum(owned, sizes)])
    if owners:
        yield ""
        yield from align(table)
    yield ""


def _part_rows(pieces: Sequence[Piece], sizes: Sizes) -> Iterator[list[str]]:
    stages = dict.fromkeys(piece.sort for piece in pieces if piece.sort not in LEFTOVERS)
    for sort in (*stages, *LEFTOVERS):
        members = [piece for piece in pieces if piece.sort == sort]
        unneeded = [piece for piece in members if not piece.needed_by]
        if members:
            frees = format_size(sizes.of((piece.path for piece in unneeded), freed=True))
            counts = (f"{len(members) - len(unneeded):,}", f"{len(unneeded):,}")
            yield [sort, f"{len(members):,}", _format_sum(members, sizes), *counts, frees]
    for name in OTHER_PARTS:
        path = settings.home() / name
        if path.exists():
            number = f"{sum(1 for _ in path.iterdir()):,}" if path.is_dir() else ""
            yield [name, number, format_size(sizes.of([path])), "", "", ""]


def _format_sum(pieces: Sequence[Piece], sizes: Sizes) -> str:
    return format_size(sizes.of(piece.path for piece in pieces))
