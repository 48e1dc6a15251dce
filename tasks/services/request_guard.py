"""The guard in front of the servers of this home: it decides about a request before anything of its body is read.

In this order:

1. The password, or the token, in an Authorization header: without it 401, also for a request that is wrong in other
   ways. Pages without data and health checks are open; nothing of a body sent to them is read.
2. The Host: 127.0.0.1 or localhost, otherwise 403. So a name that a web page has pointed at this machine is refused.
3. The origin: in a browser, only the server's own pages may read or write, otherwise 403. Links from other pages work.
   Neither is asked of a server for other machines (`any_host`), whose token no browser sends by itself.
4. The length of the body: 413 if it is announced, or found while it is read, to be too long.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tasks.servers import USER

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HOSTS = ("127.0.0.1", "localhost")
"""The names of this machine on loopback."""
BODY_BYTES = 64 * 2**20
"""The longest body, except of streams, which are not kept in memory."""
WEBSOCKET_BYTES = 2 * 2**20
"""The longest message of a WebSocket: some come before their sender's password. Prefect's longest event has 1.5 MB."""
WEBSOCKET_S = 30.0
"""A WebSocket whose first message, which has the password, does not come within this time is closed."""


class Guard:
    """An ASGI application that passes requests on to another one.

    Args:
        app: the application.
        port: of the server.
        password: of the server.
        is_open: whether a path needs no password.
        is_stream: whether a body that is sent to a path may have any length.
        hint: where the password is shown, for the message of a request without it.
        is_token: whether the password is a bearer token.
        any_host: whether the server may have any name: it listens for other machines, and its token, which no browser
            sends by itself, protects it from pages of others.
        body_bytes: the longest body.
        asks_for_login: whether a browser shows its own dialog for the password.
        websockets: whether the application checks the password of WebSockets itself, in their first message.
    """

    def __init__(
        self,
        app: App,
        port: int,
        password: str,
        *,
        is_open: Callable[[str], bool],
        is_stream: Callable[[str], bool] = lambda path: False,
        hint: str = "finetune status --password shows the login",
        is_token: bool = False,
        any_host: bool = False,
        body_bytes: int = BODY_BYTES,
        asks_for_login: bool = False,
        websockets: bool = False,
    ) -> None:
        self._app = app
        login = f"{USER}:{password}".encode()
        self._scheme, self._login = ("bearer", password.encode()) if is_token else ("basic", base64.b64encode(login))
        self._hint, self._any_host, self._body_bytes = hint, any_host, body_bytes
        self._origins = {f"http://{host}:{port}" for host in HOSTS}
        self._is_open = is_open
        self._is_stream = is_stream
        self._asks_for_login = asks_for_login
        self._websockets = websockets

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handles a request, or passes it on."""
        if scope["type"] not in ("http", "websocket"):  # the start and the end of the server
            return await self._app(scope, receive, send)
        headers = _Headers(scope)
        logged_in = self._has_login(headers["authorization"])
        status = self._refuse(scope, headers, logged_in)
        if status is not None:
            return await self._respond(scope, status, send)
        if scope["type"] == "websocket":
            return await self._app(scope, _with_password_in_time(receive, send), send)
        if not logged_in:
            return await self._app(scope, _without_body(receive), send)
        if self._is_stream(scope["path"]):
            return await self._app(scope, receive, send)
        if _announced(headers["content-length"]) > self._body_bytes:
            return await self._respond(scope, 413, send)
        return await self._pass_on(scope, receive, send)

    def _refuse(self, scope: Message, headers: _Headers, logged_in: bool) -> int | None:
        """The status of a request that is refused because of its headers; None for others."""
        asks, origin = headers["access-control-request-method"] and scope.get("method") == "OPTIONS", headers["origin"]
        is_open = scope.get("method") in ("GET", "HEAD") and self._is_open(scope["path"])
        # A browser asks without a password whether a page of the server's other name may send one.
        is_open |= bool(asks) and origin in self._origins
        is_open |= scope["type"] == "websocket" and self._websockets
        if not (logged_in or is_open):
            return 401
        if self._any_host:
            return None
        host = headers["host"]
        if host.partition(":")[0] not in HOSTS:
            return 403
        # The browser's end of a tunnel may have another port.
        if origin:
            return None if origin in {*self._origins, f"http://{host}"} else 403
        # Pictures, scripts and frames of other pages, which are requested without an Origin.
        foreign = headers["sec-fetch-site"] in ("cross-site", "same-site")
        followed = headers["sec-fetch-mode"] == "navigate" and headers["sec-fetch-dest"] == "document"
        return 403 if foreign and not (followed and scope.get("method") in ("GET", "HEAD")) else None

    def _has_login(self, header: str) -> bool:
        scheme, _, given = header.partition(" ")
        return scheme.lower() == self._scheme and secrets.compare_digest(given.encode("latin-1"), self._login)

    async def _respond(self, scope: Message, status: int, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        message = {
            401: f"Unauthorized: {self._hint}",
            403: "Forbidden: the request names another host, or comes from another page",
            413: "The body of the request is too long",
        }[status]
        # Prefect's page shows the one, clients of OpenAI's API the other.
        error = {"error": {"message": message}} if self._scheme == "bearer" else {"exception_message": message}
        text = json.dumps(error).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        headers += [(b"connection", b"close")]  # nothing of the body is read
        if status == 401 and self._asks_for_login:
            headers += [(b"www-authenticate", b'Basic realm="finetune"')]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    async def _pass_on(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes on a request, and counts its body."""
        received, started, too_long = 0, False, False

        async def count() -> Message:
            nonlocal received, too_long
            message = await receive()
            received += len(message.get("body", b""))
            too_long = too_long or received > self._body_bytes
            if too_long:  # not the end of the connection, which some applications take for the end of the body
                raise ValueError("the body of the request is too long")
            return message

        async def note(message: Message) -> None:
            nonlocal started
            if not too_long:
                started = True
                await send(message)

        try:
            await self._app(scope, count, note)
        except Exception:
            if not too_long:
                raise
        if too_long and not started:
            await self._respond(scope, 413, send)


class _Headers:
    """The headers of a request by name; empty if missing. A header that is sent twice has both values."""

    def __init__(self, scope: Message) -> None:
        self._pairs: list[tuple[bytes, bytes]] = scope["headers"]

    def __getitem__(self, name: str) -> str:
        return ",".join(value.decode("latin-1") for key, value in self._pairs if key == name.encode())


def _announced(length: str) -> int:
    return int(length) if length.isdecimal() else 0


def _without_body(receive: Receive) -> Receive:
    """Receives an empty body, and then only the end of the connection."""
    received = False

    async def receive_nothing() -> Message:
        nonlocal received
        if not received:
            received = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await receive())["type"] != "http.disconnect":
            pass
        return message

    return receive_nothing


def _with_password_in_time(receive: Receive, send: Send) -> Receive:
    """Receives the messages of a WebSocket, and its end if the first one is late."""
    has_first = False

    async def receive_in_time() -> Message:
        nonlocal has_first
        try:
            async with asyncio.timeout(None if has_first else WEBSOCKET_S):
                message = await receive()
        except TimeoutError:
            await send({"type": "websocket.close", "code": 1008})
            return {"type": "websocket.disconnect", "code": 1008}
        has_first = message["type"] == "websocket.receive"
        return message

    return receive_in_time


def serve(app: App, listening: socket.socket, **settings: Any) -> bool:
    """Serves the application on this socket until the process is stopped. Returns whether it has started.

    `settings`: more of uvicorn.Config's.
    """
    import uvicorn

    from tasks.services.limited_http import LimitedHttp, allow_connections

    allow_connections()
    server = uvicorn.Server(
        uvicorn.Config(app, http=LimitedHttp, ws_max_size=WEBSOCKET_BYTES, ws_max_queue=4, **settings)
    )
    # Not uvicorn's `fd`: it opens the descriptor as a Unix socket, for which asyncio does not turn off TCP's delays.
    server.run(sockets=[listening])
    return server.started
