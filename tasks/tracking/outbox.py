"""Outbox of a run: tracking entries on disk, delivered to MLflow when it answers.

    <home>/runs/<flow run>/outbox.jsonl    entries, append-only, in order; of a delivered run, a summary
    <home>/runs/<flow run>/delivered       number of bytes that MLflow has, and `end` if the last entry is the run's end
    <home>/runs/<flow run>/lock            held by the process of the run, from its start to its end
    <home>/runs/<flow run>/delivery.lock   held by the process that delivers

A run does not need MLflow to answer: entries keep their times until a later delivery, perhaps by the next run. An entry
may be delivered twice: MLflow ignores a point that it has, and every other entry sets a value.

A run is running while `lock` is held. `delivery.lock` is separate because delivering the entries of a killed run may
take minutes, and the run may be resumed meanwhile.
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

from tasks.home import home
from tasks.locks import exclusive_lock, is_held
from training.jobs.protocol import fsync, write_atomically

OUTBOX = "outbox.jsonl"
DELIVERED = "delivered"
PENDING_STATE = "pending_state"
"""A file in the same folder: see tasks/prefect/flow_runs.py."""
END = b" end"


class Outbox:
    """The entries of one flow run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.folder: Path = home() / "runs" / run
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.unwritten = b""
        """Bytes that a full disk did not take; written with the next entry."""
        self._ended = False
        self._lock = threading.Lock()

    def put(self, kind: str, **fields: Any) -> None:
        """Adds an entry. If the disk is full, the entry stays in memory until the next one is added.

        After an end, entries are dropped until the run starts again.
        """
        line = json.dumps({"entry": kind, "time": time.time(), **fields}) + "\n"
        with self._lock:
            if self._ended and kind != "start":
                return  # from a late thread: an entry after the end would make the run look unfinished
            self._ended = kind == "end"
            self.unwritten += line.encode()
            with contextlib.suppress(OSError):
                descriptor = os.open(self.folder / OUTBOX, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    # An almost full disk takes only some of the bytes.
                    self.unwritten = self.unwritten[os.write(descriptor, self.unwritten) :]
                finally:
                    os.close(descriptor)

    def read_undelivered(self) -> list[tuple[dict[str, Any], int]]:
        """Reads the entries that MLflow does not have yet, each with the offset of its end in the file."""
        return self.read_from(self._read_offset())

    def read_from(self, offset: int) -> list[tuple[dict[str, Any], int]]:
        """Reads the entries from this byte on, each with the offset of its end in the file."""
        path = self.folder / OUTBOX
        if not path.is_file():
            return []
        entries = []
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written: its rest would be read as another line
                    break
                offset += len(line)
                with contextlib.suppress(ValueError):  # a kill has cut it off
                    entries.append((json.loads(line), offset))
        return entries

    def read_entries(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Reads the entries of these kinds, delivered or not."""
        path, starts = self.folder / OUTBOX, tuple(f'{{"entry": "{kind}"'.encode() for kind in kinds)
        if path.is_file():
            with path.open("rb") as file:
                for line in file:
                    if line.startswith(starts):
                        with contextlib.suppress(ValueError):
                            yield json.loads(line)

    def read_start(self) -> dict[str, Any]:
        """Reads the run's first entry, which names its experiment. Raises LookupError if there is none yet."""
        with (self.folder / OUTBOX).open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if entry["entry"] == "start":
                        return dict(entry)
        raise LookupError(f"{self.folder / OUTBOX} has no start")

    def mark_delivered(self, offset: int, ended: bool = False) -> None:
        """Records that the first `offset` bytes are delivered, and whether the last entry in them is the run's end."""
        # After a power cut, entries would be written before this offset, and skipped, if the file were shorter.
        fsync(self.folder / OUTBOX)
        write_atomically(self.folder / DELIVERED, str(offset).encode() + (END if ended else b""))

    def trim(self) -> None:
        """Keeps only the start, the tags and the end if the run has ended and all entries are delivered: the record of
        the run's keys, read for each run of the home.

        Call it while this process holds both claims. If it is killed half-way, the remaining entries are delivered
        again.
        """
        path = self.folder / OUTBOX
        if not path.is_file() or self.is_open() or self.read_undelivered():
            return
        last: dict[str, dict[str, Any]] = {}
        tags: dict[str, str] = {}
        for entry in self.read_entries("start", "tags", "end"):
            tags |= entry.get("values", {})
            if entry["entry"] != "start" or "start" not in last:  # the time of the first start is that of the run
                last[entry["entry"]] = entry
        if "tags" in last:
            last["tags"] = {**last["tags"], "values": tags}
        kept = "".join(json.dumps(last[kind]) + "\n" for kind in ("start", "tags", "end") if kind in last).encode()
        if len(kept) < path.stat().st_size:
            self.mark_delivered(0)  # first: an old offset would skip entries of the shorter file
            write_atomically(path, kept)
            self.mark_delivered(len(kept), ended=True)

    def is_open(self) -> bool:
        """Whether the run has started and its last entry is not its end."""
        last = self.read_last()
        return last is not None and last["entry"] != "end"

    @contextlib.contextmanager
    def claim_run(self, wait_s: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
        """Claims the run for this process; yields False if another process still holds it after `wait_s`. Calls
        `on_wait` once after some seconds of waiting."""
        with exclusive_lock(self.folder / "lock", wait_s, on_wait) as claimed:
            if claimed:
                self._close_torn_line()
            yield claimed

    @contextlib.contextmanager
    def claim_delivery(self) -> Iterator[bool]:
        """Claims the delivery for this process; yields False if another process delivers."""
        with exclusive_lock(self.folder / "delivery.lock") as claimed:
            yield claimed

    def end_if_killed(self) -> bool:
        """Ends the run as KILLED if it is open and no process runs it. Returns whether no process runs it."""
        with self.claim_run() as claimed:
            if claimed and self.is_open():
                self.put("end", status="KILLED")
        return claimed

    def read_last(self) -> dict[str, Any] | None:
        """The last complete entry. It is read from the file's end: there may be many runs with long files."""
        path = self.folder / OUTBOX
        size = path.stat().st_size if path.is_file() else 0
        read = 4096
        while size:
            with path.open("rb") as file:
                file.seek(max(0, size - read))
                lines = file.read().splitlines()
            # The first line that was read is complete only if the whole file was read.
            for line in reversed(lines if read >= size else lines[1:]):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(line))
            if read >= size:
                break
            read *= 16
        return None

    def _close_torn_line(self) -> None:
        """Ends a line that a killed process left unfinished; the next entry would be lost with it."""
        path = self.folder / OUTBOX
        if path.is_file() and path.stat().st_size:
            with path.open("rb+", buffering=0) as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def _read_offset(self) -> int:
        try:
            return int((self.folder / DELIVERED).read_bytes().removesuffix(END))
        except (OSError, ValueError):
            return 0


def find_undelivered(except_run: str = "") -> list[Outbox]:
    """Finds the outboxes of this home that have undelivered entries or no end, except that of one run."""
    runs = home() / "runs"
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(runs) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not _is_settled(entry.path))
    return [box for box in map(Outbox, names) if box.run != except_run and (box.read_undelivered() or box.is_open())]


def _is_settled(folder: str) -> bool:
    """Whether the run's end is delivered and nothing came after it: most runs."""
    try:
        with open(os.path.join(folder, DELIVERED), "rb") as file:
            mark = file.read()
        return mark.endswith(END) and int(mark.removesuffix(END)) == os.stat(os.path.join(folder, OUTBOX)).st_size
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def running(run: str) -> Iterator[None]:
    """Marks the flow run, which has no MLflow run of its own, as one that runs here. Leaves nothing behind unless this
    process is killed, by which `was_killed_here` knows."""
    outbox = Outbox(run)
    try:
        with outbox.claim_run():
            yield
    finally:
        (outbox.folder / "lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has files of the run's stages
            outbox.folder.rmdir()


def is_running_here(run: str) -> bool:
    """Whether a process of this home runs the flow run. The Prefect server may report another state."""
    return is_held(home() / "runs" / run / "lock")


def find_undelivered_end(run: str) -> str | None:
    """The status of MLflow with which a run of this home ended, if MLflow does not have its end yet."""
    folder = home() / "runs" / run
    if not folder.is_dir() or _is_settled(str(folder)):
        return None
    last = Outbox(run).read_last()
    return last["status"] if last is not None and last["entry"] == "end" else None


def was_killed_here(run: str, silent_s: float = 0.0) -> bool:
    """Whether a flow run without a final state was killed: it began in this home, no process here runs it, and it wrote
    nothing for `silent_s`."""
    folder = home() / "runs" / run
    try:
        last_s = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # it began elsewhere, or ends just now
        return False
    return time.time() - last_s >= silent_s and not is_running_here(run)
