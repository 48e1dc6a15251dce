"""Processes as Linux shows them: their command lines, and the addresses on which they listen."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

LISTEN = "0A"


def argv(pid: int) -> list[str]:
    """The command line of a process; empty when it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")  # a fork shows its own before empty memory
    except OSError:
        return []
    return command.decode(errors="replace").split("\0") if command else []


def listening(pids: Iterable[int]) -> dict[int, set[IPv4Address | IPv6Address]]:
    """By process, the addresses of its listening TCP sockets; only processes that have one."""
    return {pid: {address for address, _ in ends} for pid, ends in listening_ports(pids).items()}


def listening_ports(pids: Iterable[int]) -> dict[int, set[tuple[IPv4Address | IPv6Address, int]]]:
    """By process, the addresses and ports of its listening TCP sockets; only processes that have one."""
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN:
                host, _, port = local.partition(":")
                words = bytes.fromhex(host)  # of 32 bits, in the order of this machine
                packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                addresses[f"socket:[{inode}]"] = (ip_address(packed), int(port, 16))
    found: dict[int, set[tuple[IPv4Address | IPv6Address, int]]] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if target in addresses:
                        found.setdefault(pid, set()).add(addresses[target])
    return found
