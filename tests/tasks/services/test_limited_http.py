"""Connections that send nothing, to a server with few open files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest

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


def read_websocket(messages: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """What an application receives of a WebSocket that sends these messages and nothing more, and what is answered."""
    seen, answered = list[str](), list[str]()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while not seen or seen[-1] != "websocket.disconnect":
            seen.append((await receive())["type"])
            await asyncio.sleep(0)

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        answered.append(message["type"])

    async def ask() -> None:
        guard = Guard(application, 1, "password", is_open=lambda path: False, websockets=True)
        scope: Any = {"type": "websocket", "path": "/api/events/in", "headers": [(b"host", b"127.0.0.1:1")]}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(guard(scope, receive, send), timeout=1.0)

    asyncio.run(ask())
    return seen, answered


def test_a_websocket_that_sends_no_password_in_time_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.services.request_guard.WEBSOCKET_S", 0.1)
    opened, first = {"type": "websocket.connect"}, {"type": "websocket.receive", "text": "{}"}
    assert read_websocket([opened]) == (["websocket.connect", "websocket.disconnect"], ["websocket.close"])
    assert read_websocket([opened, first]) == (["websocket.connect", "websocket.receive"], [])  # it may be silent then
