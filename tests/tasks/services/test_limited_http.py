"""Connections that send nothing, to a server with few open files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import urllib.error
import urllib.request

from tasks.services.request_guard import Guard, serve
from tests.fork_server import call


async def nothing_to_serve(*message: object) -> None:
    """An application that is never asked."""


def ask_beside_idle_connections() -> int:
    """The status of a request without the password, beside more connections than the files that a process may have open
    by default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0), backlog=500) as listening:
        port = listening.getsockname()[1]
        if not (server := os.fork()):
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            guard = Guard(nothing_to_serve, port, "password", is_open=lambda path: False)
            serve(guard, listening, log_level="critical", lifespan="off")
            os._exit(0)
        try:
            with contextlib.ExitStack() as idle:
                for _ in range(400):
                    idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20)
        except urllib.error.HTTPError as error:
            return error.code
        finally:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
    return 0


def test_connections_that_send_nothing_fill_no_server() -> None:
    assert call(ask_beside_idle_connections) == 401
