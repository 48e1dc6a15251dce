"""Linux processes: start time, parents, environment and signals; and the users whose processes have the ends of TCP
connections on this machine, as the kernel knows them (Linux's sock_diag, which `ss` uses).

Standard library only: the supervisor starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

SUPERVISOR = "FINETUNE_SUPERVISOR"
"""Environment variable of a job's processes: the `identity` of their supervisor."""
JOB_LINK = "job"
"""In the folder of a program that waits for its job: the link to the job's directory."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)  # at import: between fork and exec nothing may be imported


def die_with_parent() -> None:
    """Makes Linux kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose parent dies, in whatever session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def identity(pid: int) -> str:
    """A name of a process, unique until the machine restarts; a pid alone is used again."""
    return f"{pid}:{start_ticks(pid)}"


def start_ticks(pid: int) -> int:
    """The start of a process in clock ticks since boot; 0 if it has ended or is a zombie."""
    fields = _read_stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else 0


def descendants(pid: int) -> list[int]:
    """All descendants of a process, zombies included, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _read_stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        queue = [child for parent in queue for child in children.get(parent, [])]
        found += queue
    return found


def show_command(argv: Sequence[str]) -> None:
    """Makes `ps` show this command for this process, as far as there is room in the memory of its own command."""
    fields = _read_stat(os.getpid())
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end in man proc
    command = b"\0".join(os.fsencode(word) for word in argv)[: end - start - 1]
    ctypes.memmove(start, command.ljust(end - start, b"\0"), end - start)


def find_readers(path: Path) -> list[int]:
    """The processes whose standard input is this file."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.path.samefile(entry / "fd" / "0", path):
                found.append(int(entry.name))
    return found


def variable(pid: int, name: str) -> str | None:
    """An environment variable of a process at its start; None without it, or if the process has ended."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in environment.split(b"\0"))
    return next((value.decode() for key, _, value in pairs if key == name.encode()), None)


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal; the default action and ignoring are none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal; does nothing if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state, on; empty if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The second field is the program's name in parentheses, which may contain spaces and parentheses.
    return text[text.rindex(")") + 2 :].split()


class Owner(NamedTuple):
    uid: int
    inode: int
    """0 if no process has the socket: not yet accepted, or closed. The kernel may not know the uid then."""


def is_trusted(uid: int) -> bool:
    """Whether this user's processes may take part: this user, or root."""
    return uid in (0, os.getuid())


def find_owner(end: tuple[Any, ...], other_end: tuple[Any, ...]) -> Owner | None:
    """The owner of the socket that has the address `end`, connected with `other_end`; otherwise of the one that listens
    there and would accept such a connection; None if there is neither. Raises OSError if the kernel does not answer.

    The addresses are those of `getsockname` and `getpeername`. An IPv6 socket that listens for IPv4 too is found.
    """
    # struct inet_diag_req_v2 after struct nlmsghdr, of linux/inet_diag.h and linux/netlink.h.
    family = socket.AF_INET6 if ":" in end[0] else socket.AF_INET
    hosts = [socket.inet_pton(family, address[0]) for address in (end, other_end)]
    any_interface_and_cookie = struct.pack("=III", 0, 2**32 - 1, 2**32 - 1)
    any_state = 2**32 - 1
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, any_state)
    request += struct.pack("!HH16s16s", end[1], other_end[1], *hosts) + any_interface_and_cookie
    by_family, is_request = 20, 1
    header = struct.pack("=IHHII", 16 + len(request), by_family, is_request, 0, 0)
    sock_diag = 4
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, sock_diag) as kernel:
        kernel.settimeout(5)
        kernel.send(header + request)
        answer = kernel.recv(4096)
    if len(answer) < 88:  # an error instead of struct inet_diag_msg
        number = -struct.unpack_from("=i", answer, 16)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    return Owner(*struct.unpack_from("=II", answer, 80))
