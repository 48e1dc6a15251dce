"""Connections to a server of this home, while its port may belong to another user."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tasks import loopback
from tests import fork_server

NOBODY = 65534
SECRET = b"the password"

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may listen in the name of another user")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", socket.socket.connect)
    monkeypatch.setattr(loopback, "_ports", set())
    monkeypatch.setenv(loopback.HOME_SERVERS, "")


def listen(uid: int, host: str = "127.0.0.1") -> socket.socket:
    """A socket that listens in the name of this user."""
    os.seteuid(uid)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
    finally:
        os.seteuid(0)


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::"])
def thief(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """Another user's socket, where this process expects a server of its home."""
    with listen(NOBODY, request.param) as taken:
        loopback.check_listener(f"http://127.0.0.1:{taken.getsockname()[1]}/api")
        yield taken


def test_a_connection_to_another_user_s_process_is_closed_before_anything_is_sent(
    thief: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    port = thief.getsockname()[1]
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError, match=f"another user's process listens on port {port}"):
            socket.create_connection(("127.0.0.1", port)).sendall(SECRET)
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(asyncio.open_connection("127.0.0.1", port))
    assert capfd.readouterr().err.count("no password is sent") == 1
    for _ in range(4):
        connection, _ = thief.accept()
        assert connection.recv(100) == b""


def test_the_clients_of_prefect_of_mlflow_and_of_websockets_send_no_password(thief: socket.socket) -> None:
    import httpx
    import requests
    from websockets.asyncio.client import connect

    port = thief.getsockname()[1]

    async def greet() -> None:
        async with connect(f"ws://127.0.0.1:{port}/api/events/in"):
            pass

    async def ask() -> None:
        async with httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{port}/", auth=("finetune", SECRET))

    with pytest.raises(OSError, match="another user"):
        asyncio.run(greet())
    with pytest.raises(httpx.ConnectError):
        asyncio.run(ask())
    with pytest.raises(httpx.ConnectError, match="another user"):
        httpx.get(f"http://127.0.0.1:{port}/", auth=("finetune", SECRET))
    with pytest.raises(requests.ConnectionError, match="another user"):
        requests.get(f"http://127.0.0.1:{port}/", auth=("finetune", SECRET))


def test_a_server_of_this_user_is_reached_before_and_after_it_accepts() -> None:
    with listen(0) as own:
        port = own.getsockname()[1]
        loopback.check_listener(f"http://127.0.0.1:{port}")
        with socket.create_connection(("127.0.0.1", port)) as waits:
            accepted, _ = own.accept()
            waits.sendall(b"hello")
            assert accepted.recv(5) == b"hello"
            reader, _ = asyncio.run(asyncio.open_connection("127.0.0.1", port))
            assert reader is not None


def test_a_child_program_checks_too(thief: socket.socket) -> None:
    port = thief.getsockname()[1]
    program = f"import tasks.tracking.connection, socket; socket.create_connection(('127.0.0.1', {port}))"
    ended = subprocess.run([fork_server.NEW_PYTHON, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1 and "another user's process listens" in ended.stderr


def test_a_server_of_one_s_own_on_loopback_may_belong_to_another_user() -> None:
    with listen(NOBODY) as service, listen(0) as own:
        loopback.check_listener(f"http://127.0.0.1:{own.getsockname()[1]}")
        socket.create_connection(service.getsockname()).close()
