"""The users whose processes have the ends of TCP connections on this machine, as the kernel knows them (Linux's
sock_diag, which `ss` uses)."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Any, NamedTuple


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
