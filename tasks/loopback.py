"""The proof of who listens, before a password is sent to a server of this home on loopback.

Any user of a machine can listen on a port that is free. So for each connection of this process to a server of its home,
the kernel is asked whose process has the other end, once the connection is made and before anything is sent. If it is
another user, except root, the connection is closed as if none listened. A process that has the other end keeps it,
so one question is enough for all requests on a connection. Where the kernel does not answer such questions (Linux's
sock_diag, which `ss` uses), nothing is checked.

The variable FINETUNE_HOME_SERVERS names the servers for child programs that log in there: see the end of this file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

from training.jobs.processes import find_owner, is_trusted

HOME_SERVERS = "FINETUNE_HOME_SERVERS"
"""The environment variable with the URLs of the servers, separated by blanks."""
HOST = "127.0.0.1"
NOBODY_YET = ("0.0.0.0", 0)
"""The remote end of a socket that listens."""
_connect = socket.socket.connect
_ports: set[int] = set()
_reported: set[int] = set()


def check_listener(url: str) -> None:
    """From now on, this process and its children connect to this server only if it is not another user's."""
    # Prefect's, MLflow's and WebSocket's clients all connect by this method of Python's.
    socket.socket.connect = _connect_to_own  # type: ignore[assignment, method-assign]
    if port := urlsplit(url).port:
        _ports.add(port)
    os.environ[HOME_SERVERS] = " ".join(dict.fromkeys([*os.environ.get(HOME_SERVERS, "").split(), url]))


def another_user_listens(url: str) -> bool:
    """Whether a process of another user, except root, listens on the port of this URL, on 127.0.0.1."""
    with contextlib.suppress(OSError):
        owner = find_owner((HOST, urlsplit(url).port or 0), NOBODY_YET)
        return owner is not None and not is_trusted(owner.uid)
    return False


def _connect_to_own(self: socket.socket, address: Any) -> None:
    """`socket.connect`, which also checks a connection to a server of this home."""
    if self.family != socket.AF_INET or address[1] not in _ports or address[0] not in (HOST, "localhost"):
        return _connect(self, address)
    try:
        _connect(self, address)
    except BlockingIOError:  # asyncio's: a connection on loopback is made or refused before it is awaited
        _require_own(self, address[1])
        raise
    return _require_own(self, address[1])


def _require_own(connected: socket.socket, port: int) -> None:
    """Raises ConnectionRefusedError, and closes the connection, if its other end is not this user's or root's."""
    try:
        owner = find_owner((HOST, port), connected.getsockname())
        if owner is not None and not owner.inode:
            # It waits in the queue of the process that listens. If that closes its socket, the connection is reset.
            owner = find_owner((HOST, port), NOBODY_YET)
    except OSError:  # the kernel does not answer
        return
    if owner is not None and is_trusted(owner.uid):
        return
    message = f"nobody listens on port {port}."
    if owner is not None:
        message = (
            f"another user's process listens on port {port}, where a server of this home was: no password is sent."
        )
        if port not in _reported:  # once: clients retry, and some replace the message of an error
            _reported.add(port)
            print(f"{message} Start the servers on other ports: finetune up --help", file=sys.stderr, flush=True)
    connected.close()
    raise ConnectionRefusedError(errno.ECONNREFUSED, message)


for _url in os.environ.get(HOME_SERVERS, "").split():
    check_listener(_url)
