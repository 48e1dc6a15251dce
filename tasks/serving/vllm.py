"""A version of a generator that vLLM serves, and the application that passes requests on to it.

vLLM reads an exported folder (`finetune export NAME safetensors`) and listens on a port of 127.0.0.1 with a key of its
own. During a switch both versions are loaded, so each may take less than half of the GPU: `--vllm
"--gpu-memory-utilization 0.45"`.

Source: https://docs.vllm.ai/en/latest/cli/serve.html.
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
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tasks.cache.garbage_collection import in_use
from tasks.environment_variables import environment
from tasks.home import home
from tasks.loopback import another_user_listens, check_listener
from tasks.registry.model_spec import ModelSpec
from tasks.registry.version_exports import export_version
from tasks.serving.http_api import add_common_routes
from tasks.serving.metrics import Metrics
from tasks.serving.model_process import ProcessLost
from tasks.serving.page import create_app
from tasks.serving.responses import StreamOf, until_gone
from tasks.serving.served_model import ServedModel
from training.jobs.protocol import last_lines
from training.problems import UserError

PROGRAM = "vllm"
START_TIMEOUT_S = 1800.0
"""Large models take minutes to load, and vLLM compiles them."""
POLL_S = 0.5
LOG_LINES = 20
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/embeddings", "/tokenize", "/detokenize")
"""The paths that are passed on. Others of vLLM load adapters or change its state."""


class VllmProcess:
    """A version that vLLM serves, until `stop`.

    Args:
        model: the version.
        arguments: further ones for `vllm serve`.
        on_end: called in the event loop when vLLM has ended, unless `stop` ended it.
    """

    def __init__(self, model: ModelSpec, arguments: Sequence[str], on_end: Callable[[VllmProcess], None]) -> None:
        self.model = model
        self._arguments, self._on_end = arguments, on_end
        self._key = secrets.token_urlsafe(32)
        self._using = 0
        self._idle = asyncio.Event()
        self._stopping = False

    async def start(self) -> None:
        """Exports the version, starts vLLM and waits until it answers. Raises UserError if vLLM is not installed or
        does not start, and MlflowFailed."""
        if shutil.which(PROGRAM) is None:
            raise UserError.of("option", "--engine", f"{PROGRAM} is not installed: pip install {PROGRAM}.")
        (home() / "jobs").mkdir(mode=0o700, exist_ok=True)
        with in_use():
            self._folder = Path(tempfile.mkdtemp(prefix="vllm-", dir=home() / "jobs"))
            try:
                await asyncio.to_thread(export_version, self.model, "safetensors", self._folder / "model")
                self._launch()
                await self._wait_until_it_answers()
            except BaseException:
                await asyncio.to_thread(self._end)
                raise
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Waits for the answers to all requests, and ends vLLM."""
        self._stopping = True
        while self._using:
            self._idle.clear()
            await self._idle.wait()
        self._watching.cancel()
        await self._client.aclose()
        await asyncio.to_thread(self._end)

    def explain_end(self) -> str:
        """The end of vLLM's log."""
        return "\n".join([f"The end of {self._log}:", *last_lines(self._log, LOG_LINES)])

    @contextlib.asynccontextmanager
    async def send(self, request: Request, body: bytes) -> AsyncIterator[httpx2.Response]:
        """The beginning of vLLM's response to a request. Raises ProcessLost if vLLM has ended."""
        self._using += 1
        try:
            kept = {name: request.headers[name] for name in ("content-type", "accept") if name in request.headers}
            forwarded = self._client.build_request(
                request.method, request.url.path, content=body, headers=kept | {"Authorization": f"Bearer {self._key}"}
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

    def _launch(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._log = self._folder / "logs" / "1.log"
        names = [f"{self.model.name}/{self.model.version}", self.model.name]
        argv = [PROGRAM, "serve", str(self._folder / "model"), "--served-model-name", *names]
        argv += ["--host", "127.0.0.1", "--port", str(port), *self._arguments]
        supervise = [sys.executable, "-m", "training.jobs.supervise", str(self._folder), "--"]
        self._supervisor = subprocess.Popen(
            [*supervise, *argv],
            env=environment({"VLLM_API_KEY": self._key, "VLLM_NO_USAGE_STATS": "1"}),
            stdin=subprocess.PIPE,  # the end of this process closes the pipe, which ends vLLM
            start_new_session=True,
        )
        self._url = f"http://127.0.0.1:{port}"
        check_listener(self._url)  # the port is anybody's before vLLM listens, and after its end
        self._client = httpx2.AsyncClient(base_url=self._url, timeout=None, trust_env=False)

    async def _wait_until_it_answers(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if self._supervisor.poll() is not None:
                raise UserError.of("option", "--engine", f"{PROGRAM} does not start. {self.explain_end()}")
            if another_user_listens(self._url):
                raise UserError.of("option", "--engine", f"another user's process listens on {PROGRAM}'s port.")
            with contextlib.suppress(httpx2.TransportError):
                if (await self._client.get("/health")).status_code == 200:
                    return
            await asyncio.sleep(POLL_S)
        raise UserError.of("option", "--engine", f"{PROGRAM} does not answer within {START_TIMEOUT_S:g} s.")

    async def _watch(self) -> None:
        while self._supervisor.poll() is None:
            await asyncio.sleep(POLL_S)
        if not self._stopping:
            self._on_end(self)

    def _end(self) -> None:
        """Ends vLLM, and removes its files."""
        if supervisor := getattr(self, "_supervisor", None):
            if supervisor.poll() is None:
                supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()
            supervisor.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def build_app(served: ServedModel[VllmProcess], metrics: Metrics) -> FastAPI:
    """The application, which passes OpenAI's API on to vLLM."""
    app = create_app(served.model, "Served by finetune and vLLM.", holds_conversations=True)
    add_common_routes(app, served, metrics)

    async def forward(request: Request) -> Response:
        """vLLM's answer."""
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

    for path in PATHS:
        app.add_api_route(path, forward, methods=["GET" if path == "/v1/models" else "POST"], tags=["vLLM"])
    return app
