"""Transfers of files to and from a bucket: several at a time, each as an object that is named by its sha256."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from collections.abc import Callable, Collection
from contextvars import copy_context
from pathlib import Path
from threading import Event, Lock
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tasks.cache import store
from tasks.cache.remote import Progress
from tasks.shared_store.bucket import Bucket, NotFound, WrongSize

FILES_AT_ONCE = 4
"""Files that are in transfer at the same time."""

Result = TypeVar("Result")


class Stopped(Exception):
    """A transfer ended because another one failed, or its caller stopped it."""


def _inside(path: str) -> str:
    # A record is run by Prefect, and a path with `..` leaves the folder.
    if {"", ".", ".."} & set(path.split("/")) or "\0" in path or path in (store.MANIFEST, store.RECORD):
        raise ValueError("no path of a file in an artifact")
    return path


class SharedFile(BaseModel):
    """A file of an artifact or of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: Annotated[str, AfterValidator(_inside)]
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @property
    def object(self) -> str:
        """The name of its content in the bucket."""
        return f"objects/{self.sha256[:2]}/{self.sha256}"


def download(
    bucket: Bucket, name: str, file: SharedFile, target: Path, stop: Event, on_bytes: Callable[[int], None]
) -> str | None:
    """Writes the object as a file. Returns the reason if the object cannot be used."""
    digest = hashlib.sha256()
    try:
        with target.open("xb") as out:
            for chunk in bucket.stream(name, file.bytes):
                check(stop)
                digest.update(chunk)
                out.write(chunk)
                on_bytes(len(chunk))
            out.flush()
            os.fsync(out.fileno())  # while other files arrive
    except (NotFound, WrongSize) as error:
        return str(error)
    return None if digest.hexdigest() == file.sha256 else f"{name} has other bytes"


def send(bucket: Bucket, name: str, file: SharedFile, source: Path, *stops: Event) -> int:
    """Uploads a file unless the object exists. Returns the bytes that were sent."""
    check(*stops)
    if bucket.size(name) == file.bytes:
        return 0
    bucket.upload(name, source, lambda: check(*stops))
    return file.bytes


def count_bytes(total: int, progress: Progress) -> Callable[[int], None]:
    """Adds up the bytes of transfers that run at the same time."""
    turn, done = Lock(), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        with turn:
            done += count
            progress(done, total)

    return on_bytes


def check(*stops: Event) -> None:
    """Raises Stopped if one of the events is set."""
    if any(stop.is_set() for stop in stops):
        raise Stopped


def in_parallel(transfer: Callable[[SharedFile, Event], Result], files: Collection[SharedFile]) -> list[Result]:
    """The result of each transfer, in the order of the files. After an error, the others find their event set and stop
    at their next chunk. A transfer has the context variables of the caller, which Prefect needs for progress."""
    failed = Event()
    with concurrent.futures.ThreadPoolExecutor(FILES_AT_ONCE, "transfer") as pool:
        # The largest first: one that began last would end alone.
        largest_first = sorted(files, key=lambda file: -file.bytes)
        running = {file: pool.submit(copy_context().run, transfer, file, failed) for file in largest_first}
        try:
            return [running[file].result() for file in files]
        except BaseException:
            failed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
