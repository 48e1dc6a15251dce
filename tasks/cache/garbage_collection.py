"""Garbage collection of the home: which folders can be removed, and their removal.

    <home>/locks/home.lock    shared by all runs; held exclusively while folders are set aside
    <home>/.removed-<id>/     folders that were set aside and are being deleted; nothing reads them
    <home>-reproduced-<id>/   a home in the same folder, of a `finetune reproduce`: see REPRODUCES

tasks/registry/retention.py finds which keys registered versions and runs still need.

Nothing is removed while a run is running: it may have found an artifact that it has yet to read. A folder is renamed
before it is deleted, so that every reader finds all of it or nothing. The next removal completes one that was killed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pickle
import shutil
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tasks.cache import store
from tasks.cache.blocks import users_of
from tasks.home import home
from tasks.locks import FlockManager, exclusive_lock, is_held, shared_lock
from training.problems import UserError

JOBS, QUARANTINE, INCOMPLETE, REMOVED = "jobs", "quarantine", "incomplete", "half-removed"
BLOCKS = "blocks of rows"
RECORDS, REPRODUCED = "old run records", "reproductions"
REPRODUCES = "reproduces"
"""A file in a home of `finetune reproduce`, which locks it while it runs: the digest of the model to make."""
UNFINISHED_FILE = "unfinished"
"""A file in such a home whose path was not printed yet: once its process is dead, the home may be removed."""
SERVED = ("serve-", "vllm-", "llama-cpp-")
"""The beginnings of the names of servers' jobs. A server removes its own at its end, unless it is killed."""
LOCK = "home"
# Setting folders aside takes no longer than a query of MLflow; a run takes longer.
LOCK_WAIT_S = 10.0


class Needs(NamedTuple):
    """The keys and run records that something still needs."""

    needed_by: Mapping[str, Sequence[str]]
    """Descriptions of the runs and versions that need an artifact or a job, by key."""
    known: Collection[str]
    """Keys of all stages of the runs of this home."""
    finished: Mapping[str, Collection[str]]
    """Runs that need their record only as long as the store has one of their keys: the keys by the run's id."""


@dataclass(frozen=True)
class Piece:
    """A folder that is kept or removed as a whole."""

    sort: str
    """The stage of an artifact, else BLOCKS, JOBS, QUARANTINE, INCOMPLETE, REMOVED, RECORDS or REPRODUCED."""
    path: Path
    needed_by: tuple[str, ...]
    """Empty if the folder can be removed."""


@contextlib.contextmanager
def in_use(on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keeps everything in the home from removal during the block, which is a run.

    Waits, after `on_wait`, while folders are being set aside: as long as a query of MLflow takes.
    """
    with shared_lock(_lock_file(), on_wait):
        yield


def find_pieces(needs: Needs) -> list[Piece]:
    """All folders that could ever be removed, with the runs and versions that need them."""
    artifacts, jobs = [*_artifacts(needs)], [*_jobs(needs)]
    stored = {piece.path.name for piece in (*artifacts, *jobs)}
    return [*artifacts, *_blocks(artifacts), *jobs, *_leftovers(), *_records(needs, stored), *find_reproductions()]


def remove_jobs_of_killed_servers() -> None:
    """Removes nothing while a run is running or a server is loading: its job may not have its program yet."""
    with exclusive_lock(_lock_file()) as alone:
        for path in (home() / "jobs").glob("*") if alone else ():
            if path.name.startswith(SERVED) and not is_held(path / "lock"):
                shutil.rmtree(path, ignore_errors=True)


def find_reproductions() -> Iterator[Piece]:
    """The homes that `finetune reproduce` has made in the same folder and not removed. One of a process that was killed
    can be removed."""
    own = home()
    for mark in sorted(own.parent.glob(f"{glob.escape(own.name)}-reproduced-*/{REPRODUCES}")):
        folder, state = mark.parent, ""
        if is_held(mark) or any(map(is_held, folder.glob("jobs/*/lock"))):
            state = "is running"
        elif not (folder / UNFINISHED_FILE).exists():
            state = "was kept"
        yield Piece(REPRODUCED, folder, (f"a reproduction that {state}: {folder}",) if state else ())


def remove_reproduction(folder: Path) -> None:
    """Removes a home of `finetune reproduce`, unless another process uses it."""
    mark = folder / REPRODUCES
    with exclusive_lock(mark) as alone:
        for path in folder.iterdir() if alone else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in (REPRODUCES, UNFINISHED_FILE):
                path.unlink()
        if alone:  # the marks go last: a removal that is killed is completed by the next one
            shutil.rmtree(folder)


def remove(folders: Collection[Path], find_needs: Callable[[], Needs]) -> tuple[int, int]:
    """Removes those of the folders that nothing needs now. Returns their number and the bytes that this freed.

    Raises UserError while a run is running; nothing is removed then.
    """
    aside = home() / f".removed-{uuid.uuid4().hex[:12]}"
    with _no_run():
        pieces = [piece for piece in find_pieces(find_needs()) if not piece.needed_by and piece.path in folders]
        aside.mkdir(mode=0o700)
        for number, piece in enumerate(pieces):
            if piece.sort not in (REMOVED, REPRODUCED):  # these have a place of their own already
                piece.path.rename(aside / str(number))
    # Runs may start again: nothing refers to the folders that were set aside.
    from_before = [piece.path for piece in pieces if piece.sort == REMOVED]
    reproductions = [piece.path for piece in pieces if piece.sort == REPRODUCED]
    freed = bytes_on_disk([*aside.iterdir(), *from_before, *reproductions], freed=True)
    for folder in reproductions:
        remove_reproduction(folder)
    for folder in [aside, *from_before]:
        shutil.rmtree(folder, ignore_errors=True)  # another removal may be deleting it, too
    return len(pieces), freed


def require_no_run() -> None:
    """Raises UserError while a run is running over this home."""
    if runs := running_runs():
        raise _busy(", ".join(runs))


def running_runs() -> list[str]:
    """The flow runs that are running over this home, on this machine or another."""
    return [path.parent.name for path in sorted(home().glob("runs/*/lock")) if is_held(path)]


class _Usage:
    """What a folder or a file takes on the disk."""

    def __init__(self) -> None:
        self.bytes = 0
        """Without files that have several names."""
        self.linked: list[tuple[tuple[int, int], int, int]] = []
        """Device and inode, bytes and number of names of a file with several, once for each name here."""

    def add(self, status: os.stat_result) -> None:
        """Adds a file, or a folder without its content."""
        size = status.st_blocks * 512
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):  # the links of a folder are its subfolders'
            self.linked.append(((status.st_dev, status.st_ino), size, status.st_nlink))
        else:
            self.bytes += size

    def add_all(self, other: _Usage) -> None:
        """Adds all that another usage covers."""
        self.bytes += other.bytes
        self.linked += other.linked


class Sizes:
    """Disk usage of files and folders. Each is walked once, however often it is measured, alone or as a part."""

    def __init__(self) -> None:
        self._walked: dict[str, _Usage] = {}

    def of(self, paths: Iterable[Path], freed: bool = False) -> int:
        """The bytes that the paths take, or with `freed` the bytes that their removal would free. A file with several
        hard links counts once, and is freed with the last of them."""
        total = _Usage()
        for path in paths:
            total.add_all(self._walk(str(path)))
        names = Counter(file for file, _, _ in total.linked)
        return total.bytes + sum(size for file, size, links in {*total.linked} if not freed or names[file] >= links)

    def _walk(self, path: str, status: os.stat_result | None = None) -> _Usage:
        """The usage of the path and everything below it, except files that vanish meanwhile."""
        if path not in self._walked:
            usage = self._walked[path] = _Usage()
            with contextlib.suppress(OSError):
                status = status or os.lstat(path)
                usage.add(status)
                if stat.S_ISDIR(status.st_mode):
                    self._walk_entries(path, usage)
        return self._walked[path]

    def _walk_entries(self, folder: str, usage: _Usage) -> None:
        for entry in _list(folder):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if entry.is_dir(follow_symlinks=False):
                usage.add_all(self._walk(entry.path, status))
            else:
                usage.add(status)


def measure(folder: Path) -> Callable[[], Sizes]:
    """Starts a process that measures the folder and everything in it. Returns a function that waits for its result,
    which is empty if the process was killed: the sizes are then measured when they are needed."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException), open(writer, "wb") as pipe:
            sizes = Sizes()
            sizes.of([folder])
            pickle.dump(sizes, pipe)
        os._exit(0)
    os.close(writer)

    def result() -> Sizes:
        sizes = Sizes()
        with open(reader, "rb") as pipe, contextlib.suppress(EOFError, pickle.UnpicklingError):
            sizes = pickle.load(pipe)
        os.waitpid(process, 0)
        return sizes

    return result


def bytes_on_disk(paths: Iterable[Path], freed: bool = False) -> int:
    """The bytes that the paths take, or free, now: see `Sizes.of`."""
    return Sizes().of(paths, freed)


def _lock_file() -> Path:
    folder = home() / "locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{LOCK}.lock"


@contextlib.contextmanager
def _no_run() -> Iterator[None]:
    """Keeps runs from starting in the block. Raises UserError while one is running."""
    locks, holder = FlockManager(home() / "locks"), uuid.uuid4().hex
    if not locks.acquire_lock(LOCK, holder, acquire_timeout=LOCK_WAIT_S):
        raise _busy(", ".join(running_runs()) or "it started just now")
    try:
        yield
    finally:
        locks.release_lock(LOCK, holder)


def _artifacts(needs: Needs) -> Iterator[Piece]:
    for stage in sorted((home() / "artifacts").glob("*/")):
        for entry in sorted(_list(str(stage)), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                # Of a run that was killed: none is running during a removal.
                yield Piece(INCOMPLETE, stage / entry.name, ())
            elif entry.is_dir():
                yield Piece(stage.name, stage / entry.name, tuple(needs.needed_by.get(entry.name, ())))


def _blocks(artifacts: Iterable[Piece]) -> Iterator[Piece]:
    """Families of blocks of rows. One is needed as long as one of its artifacts is."""
    needed_by = {(piece.sort, piece.path.name): piece.needed_by for piece in artifacts}
    for family in sorted((home() / "blocks").glob("*/")):
        owners = [owner for user in users_of(family) for owner in needed_by.get(user, ())]
        yield Piece(BLOCKS, family, tuple(dict.fromkeys(owners)))


def _jobs(needs: Needs) -> Iterator[Piece]:
    """Jobs with their checkpoints. A job of no known run may be a command's, or another machine's."""
    for path in sorted([*(home() / "jobs").glob("*"), *(home() / "cluster").glob("*")]):
        needed_by = list(needs.needed_by.get(path.name, ()))
        if is_held(path / "lock"):
            needed_by.append("a program that is running")
        elif path.name.startswith(SERVED):
            pass
        elif path.name not in needs.known and time.time() - _last_change(path) < store.ABANDONED_S:
            needed_by.append("work of the last day")
        yield Piece(JOBS, path, tuple(needed_by))


def _leftovers() -> Iterator[Piece]:
    for path in sorted((home() / "quarantine").glob("*")):
        yield Piece(QUARANTINE, path, ())
    for path in sorted((home() / "waiting").glob("*")):
        if not is_held(path / "lock"):
            yield Piece(INCOMPLETE, path, ())
    for path in sorted(home().glob(".removed-*")):
        yield Piece(REMOVED, path, ())


def _records(needs: Needs, stored: Collection[str]) -> Iterator[Piece]:
    for run, keys in needs.finished.items():
        if not set(keys) & set(stored):
            yield Piece(RECORDS, home() / "runs" / run, ())


def _list(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder; none if it vanished or is not readable."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _last_change(folder: Path) -> float:
    """The time of the last change in the folder, in seconds since 1970."""
    times = []
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times, default=time.time())


def _busy(runs: str) -> UserError:
    message = f"a run is running over this home ({runs}): nothing is removed until it ends, or is cancelled."
    return UserError.of("option", "--remove", message)
