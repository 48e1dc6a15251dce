"""What fills the home, who needs it, and the removal of what nobody needs.

    <home>/locks/home.lock    shared by all runs; had alone while something is put aside
    <home>/.removed-<id>/     put aside and about to be deleted; nothing reads it

Needed is what made a registered version that has an alias, what the last run of a recipe left, and what a run that
did not complete would go on with. Who needs what is read from what runs have written, never told from a name.

While a run goes on nothing is removed: it may have found an artifact that it has yet to read. What is removed is first
renamed, so that every reader finds all of it or nothing; a removal that is killed is ended by the next.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.cache import history, settings, store
from tasks.cache.locks import FlockManager, held, shared
from tasks.tracking.connection import FLOW_RUN_TAG, connect, every, mlflow_errors
from tasks.tracking.mlflow_run import VERSION_TAG
from tasks.tracking.outbox import PENDING_STATE, Outbox
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient

JOBS, QUARANTINE, HALF_MADE, REMOVED = "jobs", "quarantine", "half-made", "half-removed"
RECORDS = "old run records"
LOCK = "home"
# Putting things aside takes no longer than a look into MLflow; a run goes on for longer.
LOCK_WAIT_S = 10.0


@dataclass(frozen=True)
class Piece:
    """A folder that is kept, or goes, as a whole."""

    sort: str
    """The stage of an artifact, else JOBS, QUARANTINE, HALF_MADE, REMOVED or RECORDS."""
    path: Path
    needed_by: tuple[str, ...]
    """Empty where it can go."""


@dataclass(frozen=True)
class Run:
    """A run, as it has told MLflow of itself."""

    id: str
    recipe: str
    keys: frozenset[str]
    """Of the stages that it began."""
    version: str | None
    """`name/version`, where it registered one or found it registered."""
    completed: bool
    delivered: bool
    """Whether MLflow has everything; what it has not may be a file of an artifact."""
    state_is_pending: bool
    """Whether the Prefect server has still to be told how it ended."""

    def __str__(self) -> str:
        return f"run {self.id[:8]} of {self.recipe}"


@contextlib.contextmanager
def in_use(on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Around a run: nothing is removed meanwhile. Waits, after `on_wait`, while something is being put aside: as long
    as a look into MLflow takes."""
    folder = settings.home() / "locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    with shared(folder / f"{LOCK}.lock", on_wait):
        yield


def look(given_up: Collection[str] = ()) -> list[Piece]:
    """All that could ever be removed, with who needs it; `given_up` are runs that need nothing any more.

    Raises UserError for one that no such run is, MlflowFailed where MLflow does not tell which versions have an alias.
    """
    runs = {path.name: _run(path.name) for path in sorted((settings.home() / "runs").glob("*")) if path.is_dir()}
    with mlflow_errors():
        client = connect()
        aliased = [*_aliased(client, runs)]
        needs = _needs([*aliased, *_last_of_recipes(), *_unfinished(runs, _given_up(runs, given_up), client)])
    known = {key for run in runs.values() for key in run.keys}
    artifacts, jobs = [*_artifacts(needs)], [*_jobs(needs, known)]
    stored = {piece.path.name for piece in [*artifacts, *jobs]}.union(*(keys for _, keys in aliased))
    return [*artifacts, *jobs, *_leftovers(), *_records(runs, stored)]


def remove(told: Collection[Path], given_up: Collection[str] = ()) -> tuple[int, int]:
    """Removes those of the folders `told` that nobody needs now; gives how many, and the bytes that this freed.

    Raises UserError while a run goes on, and as `look` does; then nothing is removed.
    """
    aside = settings.home() / f".removed-{uuid.uuid4().hex[:12]}"
    with _alone():
        going = [piece for piece in look(given_up) if not piece.needed_by and piece.path in told]
        aside.mkdir(mode=0o700)
        for number, piece in enumerate(going):
            if piece.sort != REMOVED:
                piece.path.rename(aside / str(number))
    # Runs may begin again: what lies aside is nobody's, whatever takes long with it.
    left_before = [piece.path for piece in going if piece.sort == REMOVED]
    freed = bytes_on_disk([*aside.iterdir(), *left_before], freed=True)
    for left in [aside, *left_before]:
        shutil.rmtree(left, ignore_errors=True)  # another removal may be at it too
    return len(going), freed


def need_quiet() -> None:
    """Raises UserError while a run goes on over this home."""
    if runs := going_on():
        raise _busy(", ".join(runs))


def going_on() -> list[str]:
    """The flow runs that go on over this home, here or elsewhere."""
    return [path.parent.name for path in sorted(settings.home().glob("runs/*/lock")) if held(path)]


class Sizes:
    """What files and folders take on the disk. Each is walked once, however often it is asked for."""

    def __init__(self) -> None:
        self._walked: dict[Path, list[os.stat_result]] = {}

    def of(self, paths: Iterable[Path], freed: bool = False) -> int:
        """The bytes that they take, or, where `freed`, that removing them would free: a file with several names
        counts once, and is freed with the last of them."""
        seen: Counter[tuple[int, int]] = Counter()
        sizes: dict[tuple[int, int], tuple[int, int]] = {}  # bytes, names
        for path in paths:
            if path not in self._walked:
                self._walked[path] = list(_statuses(path))
            for status in self._walked[path]:
                file = (status.st_dev, status.st_ino)
                seen[file] += 1
                # A folder has one name: its links are those of the folders in it.
                sizes[file] = (status.st_blocks * 512, 1 if stat.S_ISDIR(status.st_mode) else status.st_nlink)
        return sum(size for file, (size, names) in sizes.items() if not freed or seen[file] >= names)


def bytes_on_disk(paths: Iterable[Path], freed: bool = False) -> int:
    """What they take, or free, now: see `Sizes.of`."""
    return Sizes().of(paths, freed)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    locks, holder = FlockManager(settings.home() / "locks"), uuid.uuid4().hex
    if not locks.acquire_lock(LOCK, holder, acquire_timeout=LOCK_WAIT_S):
        raise _busy(", ".join(going_on()) or "it began just now")
    try:
        yield
    finally:
        locks.release_lock(LOCK, holder)


def _needs(sources: Iterable[tuple[str, Collection[str]]]) -> dict[str, list[str]]:
    """Who needs each key."""
    needs: dict[str, list[str]] = {}
    for who, keys in sources:
        for key in keys:
            needs.setdefault(key, []).append(who)
    return needs


def _aliased(client: MlflowClient, runs: Mapping[str, Run]) -> Iterator[tuple[str, set[str]]]:
    """Versions with an alias: what their tags name, and all that the run went through that registered them."""
    for model in every(client.search_registered_models):
        for alias, number in model.aliases.items():
            tags = client.get_model_version(model.name, str(number)).tags
            keys = {key for tag, key in tags.items() if tag.startswith("finetune.") and tag.endswith(".key")}
            run = runs.get(tags.get(FLOW_RUN_TAG, ""))
            yield f"{model.name}@{alias}", keys | (run.keys if run else set())


def _last_of_recipes() -> Iterator[tuple[str, set[str]]]:
    """What tells that nothing changed since the last completed run, and what did."""
    for recipe in history.recipes():
        yield f"last run of {recipe}", history.History(recipe).keys()


def _unfinished(
    runs: Mapping[str, Run], given_up: Collection[str], client: MlflowClient
) -> Iterator[tuple[str, frozenset[str]]]:
    """Runs that something is still to be done for, but for those that were given up."""
    completed = [run.keys for run in runs.values() if run.completed]
    stored = {path.name for place in ("artifacts/*/*", "jobs/*") for path in settings.home().glob(place)}
    registered = {f"{one.name}/{one.version}" for one in every(client.search_model_versions)}
    for run in runs.values():
        if run.id in given_up:
            continue
        # What another run has completed all the same, nobody goes on with. The keys of actions and of what names meant
        # change with the recipe, the gate and the time; they keep nothing.
        if not run.completed and not any(run.keys & stored <= done for done in completed):
            yield f"{run}, to go on", run.keys
        elif not run.delivered:
            yield f"{run}, to tell MLflow", run.keys
        elif run.version is not None and run.version not in registered:
            yield (
                f"{run}, whose {run.version} is registered elsewhere or was deleted; --give-up RUN if it was",
                run.keys,
            )


def _given_up(runs: Mapping[str, Run], named: Collection[str]) -> set[str]:
    """The ids of the runs. Raises UserError for what is the beginning of none, or of several."""
    found = set()
    for name in named:
        of_this = [run for run in runs if name and run.startswith(name)]
        if len(of_this) != 1:
            message = f"{name!r} begins the id of {len(of_this)} runs here: `finetune runs` lists them."
            raise _mistake("--give-up", message)
        found |= set(of_this)
    return found


def _run(id: str) -> Run:
    """What its outbox tells. One that is tried again, and goes on, has not completed."""
    tags: dict[str, str] = {}
    keys, recipe, completed, outbox = set(), "", False, Outbox(id)
    for entry in outbox.entries():
        if entry["entry"] == "start":
            recipe, completed = entry["experiment"], False
        elif entry["entry"] == "end":
            completed = entry["status"] == "FINISHED"
        elif entry["entry"] == "tags":
            tags |= entry["values"]
            keys |= {key for tag, key in entry["values"].items() if tag.endswith(".key")}
    return Run(
        id,
        recipe,
        frozenset(keys),
        tags.get(VERSION_TAG),
        completed,
        not outbox.waiting(),
        (outbox.folder / PENDING_STATE).is_file(),
    )


def _artifacts(needs: Mapping[str, list[str]]) -> Iterator[Piece]:
    for path in sorted((settings.home() / "artifacts").glob("*/*")):
        if path.name.startswith("."):
            yield Piece(HALF_MADE, path, ())  # by a run that was killed: none goes on where anything is removed
        elif path.is_dir():
            yield Piece(path.parent.name, path, tuple(needs.get(path.name, ())))


def _jobs(needs: Mapping[str, list[str]], known: Collection[str]) -> Iterator[Piece]:
    """Jobs with their checkpoints. What no run here has told of may be that of a command, or of another machine."""
    for path in sorted((settings.home() / "jobs").glob("*")):
        why = list(needs.get(path.name, ()))
        if held(path / "lock"):
            why.append("a program that runs")
        elif path.name not in known and time.time() - _last_change(path) < store.ABANDONED_S:
            why.append("work of the last day")
        yield Piece(JOBS, path, tuple(why))


def _leftovers() -> Iterator[Piece]:
    for path in sorted((settings.home() / "quarantine").glob("*")):
        yield Piece(QUARANTINE, path, ())
    for path in sorted(settings.home().glob(".removed-*")):
        yield Piece(REMOVED, path, ())


def _records(runs: Mapping[str, Run], stored: Collection[str]) -> Iterator[Piece]:
    """The records of completed runs of which the servers have everything and the store has nothing."""
    for run in runs.values():
        if run.completed and run.delivered and not run.state_is_pending and not run.keys & set(stored):
            yield Piece(RECORDS, settings.home() / "runs" / run.id, ())


def _last_change(folder: Path) -> float:
    """When something in the folder last changed, in seconds since 1970."""
    return max((status.st_mtime for status in _statuses(folder)), default=time.time())


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """Of the path and all below it. What vanishes meanwhile is passed over."""
    with contextlib.suppress(OSError):
        yield path.lstat()
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(folder, name))


def _busy(which: str) -> UserError:
    message = f"a run goes on over this home ({which}): nothing is removed until it ends, or is cancelled."
    return _mistake("--remove", message)


def _mistake(where: str, message: str) -> UserError:
    return UserError([Problem(kind="option", where=where, message=message)])
