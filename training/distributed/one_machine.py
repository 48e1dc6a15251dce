"""The group of processes that train on one machine: other users of the machine neither read nor disturb it.

torch's processes meet at a store, exchange tensors over sockets of gloo, and have a login for neither. Here the store
is a file in memory, which only this user can open. gloo listens on loopback, where any user can connect; so once the
processes are connected, and before anything is sent, the kernel is asked whose process has the other end of each
connection. Later ones are dropped. NCCL compares a random number, which its processes find in the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import socket
import stat
import struct
import time
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import _rendezvous_handlers

from training.jobs.processes import find_owner, is_trusted
from training.problems import Problem, UserError

STORE = "FINETUNE_GROUP_STORE"
"""The environment variable with the path of the store; empty for a process that is a group of its own."""
ACCEPTED_WITHIN_S = 10.0
_connect = ProcessGroupGloo.__init__


def create_store(env: MutableMapping[str, str]) -> None:
    """Creates the store of the processes that this one starts with these variables. It is gone with this process."""
    env[STORE] = f"/proc/{os.getpid()}/fd/{os.memfd_create('store')}"


def use_store() -> None:
    """Has this process join its group at the store that its launcher created, and check gloo's connections; none if
    the group has several machines."""
    if STORE in os.environ:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # else connections are made when they are used first
        _rendezvous_handlers["env"] = _meet
        ProcessGroupGloo.__init__ = _connect_to_own  # type: ignore[method-assign, assignment]


def _meet(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """The handler of torch's `env://`, by which a group is joined unless told otherwise."""
    path, size = os.environ[STORE], int(os.environ["WORLD_SIZE"])
    store = FileStore(path, size) if path else HashStore()
    store.set_timeout(timeout)
    yield store, int(os.environ["RANK"]), size


def _connect_to_own(group: ProcessGroupGloo, *args: Any, **options: Any) -> None:
    """Connects the processes of a group; raises UserError if a process of another user has taken part."""
    before = set(_sockets())
    _connect(group, *args, **options)
    for descriptor in set(_sockets()) - before:
        with socket.socket(fileno=os.dup(descriptor)) as made:
            if made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _drop_all(made)
            else:
                _require_own(made)


def _sockets() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                yield int(name)


def _drop_all(listening: socket.socket) -> None:
    """From now on, nobody connects here: the kernel drops the packets, by a filter that accepts none (socket(7)). Some
    systems permit filters to root alone."""
    so_attach_filter = 26
    accept_no_byte = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # struct sock_filter: BPF_RET
    program = struct.pack("@HP", 1, ctypes.addressof(accept_no_byte))
    with contextlib.suppress(PermissionError):
        listening.setsockopt(socket.SOL_SOCKET, so_attach_filter, program)


def _require_own(connected: socket.socket) -> None:
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    deadline = time.monotonic() + ACCEPTED_WITHIN_S
    while time.monotonic() < deadline:
        try:
            peer = connected.getpeername()
        except OSError:  # it has been closed
            break
        try:
            owner = find_owner(peer, connected.getsockname())
        except OSError:  # the kernel does not answer
            return
        if owner is None:
            break
        if owner.inode and is_trusted(owner.uid):
            return
        if owner.inode:
            raise UserError([_intruder(owner.uid)])
        time.sleep(0.01)  # the other process has not accepted it yet
    raise ConnectionError("a process of this training, or one that took its place, has closed its connection.")


def _intruder(uid: int) -> Problem:
    try:
        name = repr(pwd.getpwuid(uid).pw_name)
    except KeyError:
        name = str(uid)
    message = f"a process of the user {name} has connected in place of one of this training. Nothing was exchanged. "
    message += "End that process, or train in a container, and run the same command again."
    return Problem(kind="compute", where="compute.num_processes", message=message)
