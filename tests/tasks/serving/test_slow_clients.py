"""Limits of the time that clients take, and answers of programs that are killed."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, cast

import pytest
import uvicorn
from fastapi import FastAPI, Request
from uvicorn.server import ServerState

from tasks.services import limited_http
from tasks.serving import http_api, server
from tasks.serving.http_api import limit_body_time
from tasks.serving.model_process import ModelProcess, ProcessLost


async def exchange(sent: bytes) -> bytes:
    """All that a server answers to a client that sends this, and then nothing."""
    app = FastAPI()

    @app.post("/")
    async def receive(request: Request) -> int:
        return len(await request.body())

    config = uvicorn.Config(limit_body_time(app), log_config=None, lifespan="off")
    config.load()
    listening = await asyncio.get_running_loop().create_server(
        lambda: server._Http(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
    )
    async with listening:
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(sent)
        try:
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()


def test_a_body_that_does_not_arrive_in_time_gets_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "BODY_S", 0.1)
    answer = asyncio.run(exchange(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"))
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer.lower()


def test_a_client_whose_headers_do_not_end_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_http, "CLIENT_S", 0.1)
    assert asyncio.run(exchange(b"POST / HTTP/1.1\r\nHost: x\r\n")) == b""
    assert asyncio.run(exchange(b"")) == b""


def test_a_response_does_not_wait_for_the_clients_acknowledgement() -> None:
    async def accepted() -> bool:
        found = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            found.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with server._listen(server.ServeOptions("small", port=0)) as listening:
            async with await asyncio.start_server(accept, sock=listening):
                await asyncio.open_connection(*listening.getsockname())
                return bool(await found)

    assert asyncio.run(accepted())


def test_a_program_that_is_killed_in_the_middle_of_a_line_loses_its_requests_and_no_more() -> None:
    async def lose() -> list[bool]:
        ended: list[bool] = []
        process = ModelProcess(cast(Any, None), 1, lambda lost: ended.append(True))
        ours, program = socket.socketpair()
        process._reader, process._writer = await asyncio.open_unix_connection(sock=ours)
        receiving = asyncio.create_task(process._receive())
        first, second = process.predict([{"text": "a"}]), process.predict([{"text": "b"}])
        await asyncio.sleep(0)  # they are sent at the end of this turn
        whole = {"kind": "predicted", "id": 1, "records": [{"label": "x"}], "errors": [None], "tokens": [1]}
        program.sendall(json.dumps(whole).encode() + b'\n{"kind": "predicted", "id": 2, "rec')
        program.close()
        assert (await first).model_dump() == whole
        for lost in (second, process.predict([{"text": "c"}])):
            with pytest.raises(ProcessLost):
                await lost
        await receiving
        assert not process._waiting
        return ended

    assert asyncio.run(lose()) == [True]
