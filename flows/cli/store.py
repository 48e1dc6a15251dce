"""`finetune store`: what fills the home, who needs it, and what nobody needs; `--remove` removes that."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from flows.cli.codes import COMPLETED
from flows.reports.tables import aligned
from tasks.cache import garbage_collection, settings
from tasks.cache.garbage_collection import INCOMPLETE, JOBS, QUARANTINE, RECORDS, REMOVED, Piece, Sizes
from tasks.registry.retention import find_needs
from tasks.tracking.reports import format_count
from training.problems import Problem, UserError

# What is not a stage's comes after them.
LAST = (JOBS, QUARANTINE, INCOMPLETE, REMOVED, RECORDS)
# Of the home's other folders, those that may grow.
OTHERS = ("runs", "services", "mlartifacts", "mlflow.db", "prefect")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser
    parser = commands.add_parser("store", help="show what fills the disk, and remove some", description=__doc__)
    parser.add_argument("--remove", action="store_true", help="remove what nobody needs, after asking")
    parser.add_argument("--yes", action="store_true", help="with --remove: do not ask")
    parser.add_argument(
        "--give-up",
        metavar="RUN",
        action="append",
        default=[],
        help="a run, by its id or the beginning of it, that needs nothing any more: nobody will go on with it, MLflow "
        "shall not have the rest of it, or its version was deleted",
    )
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints the table; removes where that is asked for. Raises UserError where it may not."""
    if arguments.yes and not arguments.remove:
        raise _mistake("--yes", "is for --remove: add it, or leave this out.")
    if arguments.remove and not arguments.yes and not sys.stdin.isatty():
        raise _mistake("--remove", "there is no terminal to ask at: add --yes.")
    if not settings.home_path().exists():
        print(f"{settings.home_path()} is not there yet: nothing is stored.")
        return COMPLETED
    if arguments.remove:
        garbage_collection.require_no_run()
    pieces = garbage_collection.find_pieces(find_needs(arguments.give_up))
    sizes = Sizes()
    print(*_lines(pieces, sizes), sep="\n")
    going = [piece for piece in pieces if not piece.needed_by]
    if not going:
        print("Nothing can go.")
        return COMPLETED
    frees = size_told(sizes.of((piece.path for piece in going), freed=True))
    if not arguments.remove:
        runs = ", ".join(run[:8] for run in garbage_collection.running_runs())
        print(f"{frees} can go{f', once no run goes on here ({runs})' if runs else ''}: finetune store --remove")
        return COMPLETED
    if not arguments.yes and not _agreed(f"Remove {_named(going)}, and free {frees}? [y/N] "):
        print("Nothing was removed.")
        return COMPLETED
    removed, freed = garbage_collection.remove({piece.path for piece in going}, lambda: find_needs(arguments.give_up))
    print(f"Removed {removed:,} of {len(going):,}: {size_told(freed)} freed.")
    return COMPLETED


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() == "y"
    except EOFError:
        print()
        return False


def size_told(size_bytes: int) -> str:
    """`1.2 GB`"""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def _lines(pieces: Sequence[Piece], sizes: Sizes) -> Iterator[str]:
    """What there is, by stage; and who needs it."""
    home = settings.home()
    yield f"{home}: {size_told(sizes.of([home]))}"
    yield ""
    yield from aligned([["what", "number", "size", "needed", "can go", "frees"], *_rows(pieces, sizes)])
    needing = list(dict.fromkeys(who for piece in pieces for who in piece.needed_by))
    table = [["needed by", "artifacts", "jobs", "size"]]
    for who in needing:
        of_it = [piece for piece in pieces if who in piece.needed_by]
        jobs = sum(piece.sort == JOBS for piece in of_it)
        table.append([who, f"{len(of_it) - jobs:,}", f"{jobs:,}", _size(of_it, sizes)])
    if needing:
        yield ""
        yield from aligned(table)
    yield ""


def _rows(pieces: Sequence[Piece], sizes: Sizes) -> Iterator[list[str]]:
    sorts = [*dict.fromkeys(piece.sort for piece in pieces if piece.sort not in LAST), *LAST]
    for sort in sorts:
        if not (of_it := [piece for piece in pieces if piece.sort == sort]):
            continue
        going = [piece for piece in of_it if not piece.needed_by]
        frees = sizes.of((piece.path for piece in going), freed=True)
        numbers = (f"{len(of_it) - len(going):,}", f"{len(going):,}", size_told(frees))
        yield [sort, f"{len(of_it):,}", _size(of_it, sizes), *numbers]
    for name in OTHERS:
        path = settings.home() / name
        if path.exists():
            number = f"{sum(1 for _ in path.iterdir()):,}" if path.is_dir() else ""
            yield [name, number, size_told(sizes.of([path])), "", "", ""]


def _size(pieces: Sequence[Piece], sizes: Sizes) -> str:
    return size_told(sizes.of(piece.path for piece in pieces))


def _named(going: Sequence[Piece]) -> str:
    """`3 artifacts, 1 job and 2 others`"""
    jobs, others = (sum(piece.sort in sorts for piece in going) for sorts in ((JOBS,), LAST[1:]))
    artifacts = len(going) - jobs - others
    named = ((artifacts, "artifact"), (jobs, "job"), (others, "leftover"))
    return ", ".join(format_count(number, noun) for number, noun in named if number)


def _mistake(where: str, message: str) -> UserError:
    return UserError([Problem(kind="option", where=where, message=message)])
