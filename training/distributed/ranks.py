"""What the processes (ranks) of one job agree on. With one process nothing is sent and nothing waits.

Small decisions travel over gloo, also where gradients travel over NCCL: a GPU need not stop for them.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
from torch import distributed

T = TypeVar("T")

NO_LIMIT = timedelta(days=365)
"""How long one may keep the others waiting: whether the job as a whole is stalled is judged elsewhere."""


def meet() -> torch.device:
    """Has the processes that were launched together find each other, where what they run does not do that itself; gives
    this one's GPU, or the CPU where there is none."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        distributed.init_process_group("gloo", timeout=NO_LIMIT)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def any_rank(*flags: bool) -> list[bool]:
    """Each flag, true where it is true on at least one rank. Every rank calls it at the same place."""
    if _alone():
        return list(flags)
    shared = torch.tensor(flags, dtype=torch.uint8)
    distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=_talk())
    return [bool(flag) for flag in shared]


def from_first(value: T) -> T:
    """Rank 0's value, on every rank."""
    if _alone():
        return value
    held = [value]
    distributed.broadcast_object_list(held, src=0, group=_talk())
    return held[0]


def from_all(value: T) -> list[T]:
    """Every rank's value, on every rank."""
    if _alone():
        return [value]
    held: list[T] = [value] * distributed.get_world_size()
    distributed.all_gather_object(held, value, group=_talk())
    return held


def to_first(value: T) -> list[T]:
    """Every rank's value on rank 0; nothing on the others."""
    if _alone():
        return [value]
    first = distributed.get_rank() == 0
    held: list[T] = [value] * distributed.get_world_size()
    distributed.gather_object(value, held if first else None, dst=0, group=_talk())
    return held if first else []


def wait_for_all() -> None:
    """Returns when every rank has come here."""
    if not _alone():
        distributed.barrier(group=_talk())


def part() -> None:
    """Ends the group, all together: ranks that leave while others still talk may abort at exit."""
    if not _alone():
        wait_for_all()
        _talk.cache_clear()
        distributed.destroy_process_group()


def joined() -> int:
    """How many processes have found each other."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def place() -> int:
    """This process's place among those that have found each other."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def _alone() -> bool:
    return joined() == 1


@cache
def _talk() -> distributed.ProcessGroup | None:
    """The default group where that is gloo's, else one of gloo's beside it."""
    return None if distributed.get_backend() == "gloo" else distributed.new_group(backend="gloo")
