"""Small collective operations between the processes (ranks) of one job. With one process they return at once.

They use gloo even if gradients use NCCL, so a GPU does not have to synchronize for them.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

from training.distributed import one_machine

T = TypeVar("T")

NO_LIMIT = timedelta(days=365)
"""The timeout of the group. The supervisor of the job detects stalls."""


def host_store(listening: socket.socket, machines: int, timeout: timedelta) -> TCPStore:
    """The store at which the processes of several machines meet. It listens on this socket alone: by default, torch's
    listens on all interfaces, and it has no login."""
    host, port = listening.getsockname()[:2]
    return TCPStore(host, port, machines, True, timeout, multi_tenant=True, master_listen_fd=listening.detach())


def join_group() -> torch.device:
    """Joins the group of the launched processes, for programs without a Trainer. Returns the GPU of this process, or
    the CPU if there is none."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        one_machine.use_store()
        distributed.init_process_group("gloo", timeout=NO_LIMIT)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def leave_group() -> None:
    """Ends the group after all ranks have called it: a rank that leaves earlier may make the others abort at exit."""
    if world_size() > 1:
        barrier()
        group.cache_clear()
        distributed.destroy_process_group()


def any_rank(*flags: bool) -> list[bool]:
    """Each flag, true if it is true on at least one rank. Every rank calls it at the same place."""
    if world_size() == 1:
        return list(flags)
    shared = torch.tensor(flags, dtype=torch.uint8)
    distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=group())
    return [bool(flag) for flag in shared]


def broadcast(value: T, source: int = 0) -> T:
    """The value of the rank `source`, on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=source, group=group())
    return values[0]


def all_gather(value: T) -> list[T]:
    """Every rank's value, on every rank."""
    values = [value] * world_size()
    if len(values) > 1:
        distributed.all_gather_object(values, value, group=group())
    return values


def gather(value: T) -> list[T]:
    """Every rank's value on rank 0; an empty list on the others."""
    values = [value] * world_size() if rank() == 0 else []
    if world_size() > 1:
        distributed.gather_object(value, values or None, dst=0, group=group())
    return values


def barrier() -> None:
    """Waits until every rank has called it."""
    if world_size() > 1:
        distributed.barrier(group=group())


def world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


@cache
def group() -> distributed.ProcessGroup | None:
    """A gloo group: the default group (None) if it is one."""
    return None if distributed.get_backend() == "gloo" else distributed.new_group(backend="gloo")
