"""A version of a generator that the server of another project serves, and the application that passes requests on.

The server reads an exported folder, and listens on a port of 127.0.0.1 with a key of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx2
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tasks.cache.garbage_collection import in_use
from tasks.environment_variables import environment
from tasks.home import home
from tasks.loopback import another_user_listens, check_listener
from tasks.registry.model_spec import ModelSpec
from tasks.serving.http_api import add_common_routes
from tasks.serving.metrics import Metrics
from tasks.serving.model_process import ProcessLost
from tasks.serving.page import create_app
from tasks.serving.responses import StreamOf, until_gone
from tasks.serving.served_model import ServedModel
from training.jobs.protocol import last_lines
from training.problems import UserError

START_TIMEOUT_S = 1800.0
"""Large models take minutes to load, and some servers compile them."""
POLL_S = 0.5
LOG_LINES = 20


class OpenaiServer(ABC):
    """A version that a server with OpenAI's API serves, until `stop`.

    Args:
        model: the version.
        on_end: called in the event loop when the server has ended, unless `stop` ended it.
    """

    title: ClassVar[str]
    """The server's name."""
    prefix: ClassVar[str]
    """Of the names of its folders in the home's `jobs`, one of tasks.cache.garbage_collection.SERVED."""
    option: ClassVar[str]
    """Of `finetune serve`, which chooses it."""
    health_path: ClassVar[str]
    """It has the status 200 once the server answers."""
    paths: ClassVar[Sequence[str]]
    """The paths that are passed on."""

    def __init__(self, model: ModelSpec, on_end: Callable[[Any], None]) -> None:
        self.model = model
        self._on_end = on_end
        self.key = secrets.token_urlsafe(32)
        """That its requests need."""
        self._using = 0
        self._idle = asyncio.Event()
        self._stopping = False

    @abstractmethod
    def require_installed(self) -> None:
        """Raises UserError if the server is not installed."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Writes the version to this new folder, as the server reads it. Raises UserError and MlflowFailed."""

    @abstractmethod
    def command(self, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        """The command that serves the folder on this port of 127.0.0.1, and its variables. `key` may be in variables
        and files, not in the command, which every user of the machine sees."""

    async def start(self) -> None:
        """Exports the version, starts the server and waits until it answers. Raises UserError if it is not installed or
        does not start, and MlflowFailed."""
        self.require_installed()
        (home() / "jobs").mkdir(mode=0o700, exist_ok=True)
        with in_use():
            self._folder = Path(tempfile.mkdtemp(prefix=self.prefix, dir=home() / "jobs"))
            try:
                await asyncio.to_thread(self.export, self._folder / "model")
                self._launch()
                await self._wait_until_it_answers()
            except BaseException:
                await asyncio.to_thread(self._end)
                raise
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Waits for the answers to all requests, and ends the server."""
        self._stopping = True
        while self._using:
            self._idle.clear()
            await self._idle.wait()
        self._watching.cancel()
        await self._client.aclose()
        await asyncio.to_thread(self._end)

    def explain_end(self) -> str:
        """The end of the server's log."""
        return "\n".join([f"The end of {self._log}:", *last_lines(self._log, LOG_LINES)])

    @contextlib.asynccontextmanager
    async def send(self, request: Request, body: bytes) -> AsyncIterator[httpx2.Response]:
        """The beginning of the server's response to a request. Raises ProcessLost if it has ended."""
        self._using += 1
        try:
            kept = {name: request.headers[name] for name in ("content-type", "accept") if name in request.headers}
            forwarded = self._client.build_request(
                request.method, request.url.path, content=body, headers=kept | self._authorization
            )
            response = await self._client.send(forwarded, stream=True)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx2.TransportError as error:
            raise ProcessLost() from error
        finally:
            self._using -= 1
            if not self._using:
                self._idle.set()

    @property
    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def _launch(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._log = self._folder / "logs" / "1.log"
        argv, variables = self.command(self._folder / "model", port)
        supervise = [sys.executable, "-m", "training.jobs.supervise", str(self._folder), "--"]
        self._supervisor = subprocess.Popen(
            [*supervise, *argv],
            env=environment(variables),
            stdin=subprocess.PIPE,  # the end of this process closes the pipe, which ends the server
            start_new_session=True,
        )
        self._url = f"http://127.0.0.1:{port}"
        check_listener(self._url)  # the port is anybody's before the server listens, and after its end
        self._client = httpx2.AsyncClient(base_url=self._url, timeout=None, trust_env=False)

    async def _wait_until_it_answers(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if self._supervisor.poll() is not None:
                raise UserError.of("option", self.option, f"{self.title} does not start. {self.explain_end()}")
            if another_user_listens(self._url):
                message = f"another user's process listens on the port of {self.title}."
                raise UserError.of("option", self.option, message)
            with contextlib.suppress(httpx2.TransportError):
                if (await self._client.get(self.health_path, headers=self._authorization)).status_code == 200:
                    return
            await asyncio.sleep(POLL_S)
        raise UserError.of("option", self.option, f"{self.title} does not answer within {START_TIMEOUT_S:g} s.")

    async def _watch(self) -> None:
        while self._supervisor.poll() is None:
            await asyncio.sleep(POLL_S)
        if not self._stopping:
            self._on_end(self)

    def _end(self) -> None:
        """Ends the server, and removes its files."""
        if supervisor := getattr(self, "_supervisor", None):
            if supervisor.poll() is None:
                supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()
            supervisor.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def build_app(served: ServedModel[OpenaiServer], metrics: Metrics, kind: type[OpenaiServer]) -> FastAPI:
    """The application, which passes OpenAI's API on to the server."""
    app = create_app(served.model, f"Served by finetune and {kind.title}.", holds_conversations=True)
    add_common_routes(app, served, metrics)

    async def forward(request: Request) -> Response:
        """The server's answer."""
        body = await request.body()
        async with contextlib.AsyncExitStack() as block:
            process = await block.enter_async_context(served.use())
            response = await until_gone(request, block.enter_async_context(process.send(request, body)))
            options: dict[str, Any] = {"status_code": response.status_code}
            if kind := response.headers.get("content-type"):
                options["media_type"] = kind
            if kind and kind.startswith("text/event-stream"):
                return StreamOf(response.aiter_text(), block.pop_all(), **options)
            return Response(await until_gone(request, response.aread()), **options)

    for path in kind.paths:
        app.add_api_route(path, forward, methods=["GET" if path == "/v1/models" else "POST"], tags=[kind.title])
    return app
