"""The command `store`: the size of stored data, and its removal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from flows.cli.shared import COMPLETED
from flows.reports.tables import align
from tasks.cache import garbage_collection
from tasks.cache.garbage_collection import (
    BLOCKS,
    INCOMPLETE,
    JOBS,
    QUARANTINE,
    RECORDS,
    REMOVED,
    REPRODUCED,
    Piece,
    Sizes,
)
from tasks.home import home, home_path, tracking_is_local
from tasks.registry.retention import find_needs, find_shared_needs
from tasks.reports.formatting import format_size
from tasks.shared_store.bucket import Entry
from tasks.shared_store.maintenance import Content, Maintenance, Plan
from training.problems import UserError

DAYS = 30
# Listed after the artifacts of the stages.
LEFTOVERS = (BLOCKS, JOBS, QUARANTINE, INCOMPLETE, REMOVED, RECORDS, REPRODUCED)
OTHER_PARTS = ("runs", "services", "mlartifacts", "mlflow.db", "prefect")  # of the home, that grow


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--remove", action="store_true", help="remove what nothing needs, after a question")
    parser.add_argument("--yes", action="store_true", help="with --remove: do not ask")
    parser.add_argument(
        "--shared", action="store_true", help="the shared store alone (FINETUNE_STORE), for all machines that use it"
    )
    parser.add_argument(
        "--days",
        type=int,
        metavar="N",
        help=f"with --shared: keep what runs of the last N days need (default: {DAYS})",
    )
    parser.add_argument(
        "--give-up",
        metavar="RUN",
        action="append",
        default=[],
        help="the id of a run, or its first digits, that needs nothing any more: it will not be resumed, MLflow shall "
        "not get the rest of it, or its version was deleted",
    )


def store(arguments: argparse.Namespace) -> int:
    """Show what fills the home and the shared store, what needs it, and what can be removed."""
    if arguments.yes and not arguments.remove:
        raise UserError.of("option", "--yes", "needs --remove: add it, or leave this option out.")
    if arguments.remove and not arguments.yes and not sys.stdin.isatty():
        raise UserError.of("option", "--remove", "needs a terminal for its question: add --yes.")
    if arguments.days is not None and not arguments.shared:
        raise UserError.of("option", "--days", "needs --shared: add it, or leave this option out.")
    if arguments.days is not None and arguments.days < 1:
        raise UserError.of("option", "--days", f"{arguments.days} is too few: at least 1 day is kept.")
    if arguments.give_up and arguments.shared:
        message = "is for runs of this home: leave it out, or --shared."
        raise UserError.of("option", "--give-up", message)
    if arguments.shared:
        return _execute_shared(arguments)
    if not home_path().exists():
        print(f"{home_path()} does not exist yet: nothing is stored.")
    else:
        _execute_here(arguments)
    if os.environ.get("FINETUNE_STORE") and not arguments.remove:
        _show_shared()
    return COMPLETED


def _execute_here(arguments: argparse.Namespace) -> None:
    if arguments.remove:
        garbage_collection.require_no_run()
    measured = garbage_collection.measure(home())  # while this process imports MLflow and reads the registry
    pieces = garbage_collection.find_pieces(find_needs(arguments.give_up))
    sizes = measured()
    print(*_format_tables(pieces, sizes), sep="\n")
    unneeded = [piece for piece in pieces if not piece.needed_by]
    if not unneeded:
        print("Nothing can go.")
        return
    size = format_size(sizes.of((piece.path for piece in unneeded), freed=True))
    if not arguments.remove:
        runs = ", ".join(run[:8] for run in garbage_collection.running_runs())
        print(f"{size} can go{f', after these runs have ended: {runs}' if runs else ''}: finetune store --remove")
        return
    if not arguments.yes and not _confirm(f"Remove {len(unneeded):,} of these, and free {size}? [y/N] "):
        print("Nothing was removed.")
        return
    paths = {piece.path for piece in unneeded}
    removed, freed = garbage_collection.remove(paths, lambda: find_needs(arguments.give_up))
    print(f"Removed {removed:,} of {len(unneeded):,}: {format_size(freed)} freed.")


def _show_shared() -> None:
    """Shows what one listing of the bucket says."""
    store = Maintenance.of_environment(lambda: ())
    print("", *_format_content(store.url, store.list_content()), "What can go: finetune store --shared", sep="\n")


def _execute_shared(arguments: argparse.Namespace) -> int:
    days = arguments.days or DAYS
    store = Maintenance.of_environment(lambda: find_shared_needs(days))
    if tracking_is_local():
        message = "is not set: name the MLflow server of all machines, which knows what they need."
        raise UserError.of("option", "MLFLOW_TRACKING_URI", message)
    content, plan = store.inspect()
    print(*_format_content(store.url, content, plan), sep="\n")
    if not plan.entries:
        print("Nothing can go.")
        return COMPLETED
    size = f"{len(plan.entries):,} objects, {format_size(plan.bytes)}"
    if not arguments.remove:
        print(f"{size} can go: finetune store --shared --remove")
    elif not arguments.yes and not _confirm(f"Remove {size}, which no machine of the team will have any more? [y/N] "):
        print("Nothing was removed.")
    else:
        removed = store.remove(plan, lambda owner: print(f"waiting for another removal ({owner})", file=sys.stderr))
        freed = format_size(sum(entry.bytes for entry in removed))
        print(f"Removed {len(removed):,} of {len(plan.entries):,} objects: {freed} freed.")
    return COMPLETED


def _format_content(url: str, content: Content, plan: Plan | None = None) -> Iterator[str]:
    """Formats a table of the bucket's parts, with what of them can go if there is a plan."""
    yield f"{url}: {format_size(content.bytes)}"
    yield ""
    groups: dict[str, list[Entry]] = {}
    for entry, (stage, _) in content.artifacts.items():
        groups.setdefault(stage, []).append(entry)
    groups = dict(sorted(groups.items())) | {
        # Each content once: the lines of the stages have the manifests alone.
        "files": list(content.objects.values()),
        "checkpoints": [entry for group in content.checkpoints.values() for entry in group],
        "leases, uploads": [*content.leases, *content.announced, *content.probes],
    }
    going = {*plan.entries} if plan else set()
    table = [["what", "number", "size", "needed", "can go", "frees"][: None if plan else 3]]
    for name, entries in groups.items():
        if entries:
            gone = [entry for entry in entries if entry in going]
            counts = [f"{len(entries) - len(gone):,}", f"{len(gone):,}", _format_entries(gone)] if plan else []
            table.append([name, f"{len(entries):,}", _format_entries(entries), *counts])
    yield from align(table)
    yield ""


def _format_entries(entries: list[Entry]) -> str:
    return format_size(sum(entry.bytes for entry in entries))


def _confirm(question: str) -> bool:
    try:
        return input(question).strip().lower() == "y"
    except EOFError:
        print()
        return False


def _format_tables(pieces: Sequence[Piece], sizes: Sizes) -> Iterator[str]:
    """Formats a table of the home's parts, and one of the runs and versions that need them."""
    folder = home()
    yield f"{folder}: {format_size(sizes.of([folder]))}"
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
    for piece in pieces:
        if piece.sort == REPRODUCED and not piece.needed_by:
            yield f"{piece.path} is of a `finetune reproduce` that was killed."


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
        path = home() / name
        if path.exists():
            number = f"{sum(1 for _ in path.iterdir()):,}" if path.is_dir() else ""
            yield [name, number, format_size(sizes.of([path])), "", "", ""]


def _format_sum(pieces: Sequence[Piece], sizes: Sizes) -> str:
    return format_size(sizes.of(piece.path for piece in pieces))
