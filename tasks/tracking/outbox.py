"""Outbox of a run: tracking entries on disk, delivered to MLflow when it answers.

    <home>/runs/<flow run>/outbox.jsonl    entries, append-only, in order
    <home>/runs/<flow run>/delivered       number of bytes that MLflow has
    <home>/runs/<flow run>/lock            held by the process of the run, from its start to its end
    <home>/runs/<flow run>/delivery.lock   held by the process that delivers

A tracker that is down costs a run nothing: entries keep their times and wait for the next delivery, which may be the
next run's. An entry may be delivered twice without harm: MLflow drops a point that it has, and all else is set, not
added.

Only the first lock tells whether a run is running. Delivering the entries of a killed run may take minutes, during
which the run may be resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.cache import settings
from tasks.cache.locks import exclusive_lock, is_held
from training.jobs.protocol import write_atomically

OUTBOX = "outbox.jsonl"
DELIVERED = "delivered"
PENDING_STATE = "pending_state"
"""Beside them: see tasks/prefect/pending_states.py."""
FIGURES = b'{"entry": "metrics"'
"""The beginning of a line of figures."""


class Outbox:
    """The entries of one flow run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.folder: Path = settings.home() / "runs" / run
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.unwritten = b""
        """Bytes that a full disk did not take; written with the next entry."""
        self._ended = False
        self._lock = threading.Lock()

    def put(self, kind: str, **fields: Any) -> None:
        """Adds an entry. An entry that the disk does not take stays in memory and is no error.

        After the end, until the run starts again, entries are dropped.
        """
        line = json.dumps({"entry": kind, "time": time.time(), **fields}) + "\n"
        with self._lock:
            if self._ended and kind != "start":
                return  # from a late thread: behind the end, it would make the run look unfinished
            self._ended = kind == "end"
            self.unwritten += line.encode()
            with contextlib.suppress(OSError):
                descriptor = os.open(self.folder / OUTBOX, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    # A disk that is almost full takes a part.
                    self.unwritten = self.unwritten[os.write(descriptor, self.unwritten) :]
                finally:
                    os.close(descriptor)

    def read_undelivered(self) -> list[tuple[dict[str, Any], int]]:
        """Entries not delivered yet, each with the offset behind it."""
        path = self.folder / OUTBOX
        if not path.is_file():
            return []
        offset = self._read_offset()
        entries = []
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                offset += len(line)
                # A line torn by a kill is passed over; one still being written has no newline yet.
                with contextlib.suppress(ValueError):
                    entries.append((json.loads(line), offset))
        return entries

    def read_entries(self) -> Iterator[dict[str, Any]]:
        """All entries except figures, which are most of the file; delivered or not."""
        path = self.folder / OUTBOX
        if path.is_file():
            with path.open("rb") as file:
                for line in file:
                    if not line.startswith(FIGURES):
                        with contextlib.suppress(ValueError):
                            yield json.loads(line)

    def read_start(self) -> dict[str, Any]:
        """The run's first entry, with its experiment. Raises LookupError if there is none yet."""
        with (self.folder / OUTBOX).open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if entry["entry"] == "start":
                        return dict(entry)
        raise LookupError(f"{self.folder / OUTBOX} has no start")

    def mark_delivered(self, offset: int) -> None:
        """Records that the first `offset` bytes are delivered."""
        write_atomically(self.folder / DELIVERED, str(offset).encode())

    def trim(self) -> None:
        """Drops the figures, which are most of the file, of a run that ended and that MLflow has completely.

        Call it while this process has claimed the outbox and delivers it. After a kill half-way, MLflow only gets the
        same entries again.
        """
        path = self.folder / OUTBOX
        if not path.is_file() or self.is_open() or self.read_undelivered():
            return
        with path.open("rb") as file:
            kept = b"".join(line for line in file if not line.startswith(FIGURES))
        if len(kept) < path.stat().st_size:
            self.mark_delivered(0)
            write_atomically(path, kept)
            self.mark_delivered(len(kept))

    def is_open(self) -> bool:
        """Whether the run has started and its last entry is not its end."""
        last = self._read_last()
        return last is not None and last["entry"] != "end"

    @contextlib.contextmanager
    def claim_run(self, wait_s: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
        """Claims the run for this process; yields False if another process still holds it after `wait_s`. `on_wait` is
        called once if that takes longer than some seconds."""
        with exclusive_lock(self.folder / "lock", wait_s, on_wait) as mine:
            if mine:
                self._close_torn_line()
            yield mine

    @contextlib.contextmanager
    def claim_delivery(self) -> Iterator[bool]:
        """Claims the delivery for this process; yields False while another process delivers."""
        with exclusive_lock(self.folder / "delivery.lock") as mine:
            yield mine

    def end_if_killed(self) -> bool:
        """Whether no process runs the run. If it has no end yet, an end as KILLED is added."""
        with self.claim_run() as mine:
            if mine and self.is_open():
                self.put("end", status="KILLED")
        return mine

    def _read_last(self) -> dict[str, Any] | None:
        """The last whole entry. Read from the file's end: there may be many runs, most of which ended long ago."""
        path = self.folder / OUTBOX
        size = path.stat().st_size if path.is_file() else 0
        read = 4096
        while size:
            with path.open("rb") as file:
                file.seek(max(0, size - read))
                lines = file.read().splitlines()
            # The first line is whole only at the beginning of the file.
            for line in reversed(lines if read >= size else lines[1:]):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(line))
            if read >= size:
                break
            read *= 16
        return None

    def _close_torn_line(self) -> None:
        """Ends the line that a killed process left; otherwise the next entry would be lost with it."""
        path = self.folder / OUTBOX
        if path.is_file() and path.stat().st_size:
            with path.open("rb+", buffering=0) as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def _read_offset(self) -> int:
        try:
            return int((self.folder / DELIVERED).read_text())
        except (OSError, ValueError):
            return 0


def find_undelivered(except_run: str = "") -> list[Outbox]:
    """Outboxes of this home, except that of one run, with entries to deliver or without an end."""
    runs = settings.home() / "runs"
    # Unlike iterdir, glob finds nothing if the folder was removed.
    others = [path.name for path in sorted(runs.glob("*")) if path.is_dir() and path.name != except_run]
    boxes = [Outbox(name) for name in others]
    return [box for box in boxes if box.read_undelivered() or box.is_open()]


def is_running_here(run: str) -> bool:
    """Whether a process of this home runs the flow run, whatever its state at the Prefect server."""
    return is_held(settings.home() / "runs" / run / "lock")


def was_killed_here(run: str) -> bool:
    """Whether the flow run, which has no final state, began in this home and no process here runs it any more."""
    return (settings.home() / "runs" / run).is_dir() and not is_running_here(run)
