"""Files of a training on several machines: copies between job folders that only the ranks of one machine see.

The first rank of a folder, which is the lowest that sees it, sends and receives its files. If all ranks see rank 0's
folder, as on one machine or over a network file system, nothing is copied. Every rank calls each function.
"""

from __future__ import annotations

import os
import shutil
import uuid
from functools import cache
from pathlib import Path

import torch
from torch import distributed

from training.distributed import ranks
from training.jobs.protocol import fsync

CHUNK_BYTES = 2**24


@cache
def first_ranks(folder: Path) -> tuple[int, ...]:
    """The first rank of each folder that is `folder` on some machine, in ascending order; (0,) if all ranks see one."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size()))
    if here == ranks.world_size():
        return (0,)
    mark = folder / f".rank{ranks.rank()}-{uuid.uuid4().hex}"
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        marks = ranks.all_gather(mark.name)
        lowest = next(number for number, name in enumerate(marks) if (folder / name).exists())
        return tuple(sorted(set(ranks.all_gather(lowest))))
    finally:
        mark.unlink()


def collect(folder: Path) -> None:
    """Waits until every rank has written its files into `folder`, and moves those of other machines to rank 0's.

    Raises FileExistsError if ranks of two machines wrote a file of one name.
    """
    ranks.barrier()
    for source in first_ranks(folder.parent)[1:]:
        if ranks.rank() == source:
            _send(folder, 0)
            shutil.rmtree(folder)
        elif ranks.rank() == 0:
            _receive(folder, source)


def distribute(folder: Path, source: int = 0, has_copy: bool = False) -> None:
    """Replaces `folder` on every machine by that of the rank `source`, the first of its folder, and waits until the
    copies are complete and on the disk.

    A rank with `has_copy` keeps the folder of its machine. A copy that is cut off leaves `.writing-<name>` behind.
    """
    copies = ranks.all_gather(has_copy)
    for target in first_ranks(folder.parent):
        if target == source or copies[target]:
            continue
        if ranks.rank() == source:
            _send(folder, target)
        elif ranks.rank() == target:
            aside = folder.with_name(f".writing-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            _receive(aside, source)
            for path in [aside, *aside.rglob("*")]:
                fsync(path)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(aside, folder)
            fsync(folder.parent)
    ranks.barrier()


def _send(folder: Path, target: int) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]
    distributed.send_object_list([files], target, group=ranks.group())
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for path, (_, size) in zip(paths, files, strict=True):
        with open(path, "rb") as file:
            for start in range(0, size, CHUNK_BYTES):
                chunk = buffer[: size - start]
                if file.readinto(chunk) != len(chunk):
                    raise OSError(f"{path} was cut while it was sent to another machine.")
                distributed.send(torch.frombuffer(chunk, dtype=torch.uint8), target, group=ranks.group())


def _receive(folder: Path, source: int) -> None:
    received: list[list[tuple[str, int]]] = [[]]
    distributed.recv_object_list(received, source, group=ranks.group())
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for name, size in received[0]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "xb") as file:
            for start in range(0, size, CHUNK_BYTES):
                chunk = buffer[: size - start]
                distributed.recv(torch.frombuffer(chunk, dtype=torch.uint8), source, group=ranks.group())
                file.write(chunk)
