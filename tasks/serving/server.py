"""The server of a registered model: its sockets, its token, and its end.

python -m tasks.serving.server NAME --fd FD    as a service of `finetune up --serve NAME`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import uvicorn

from tasks.cache.garbage_collection import remove_jobs_of_killed_servers
from tasks.environment_variables import prepare_environment
from tasks.home import create_secret
from tasks.jobs.launch import JobFailed
from tasks.prediction.chat_job import can_talk
from tasks.registry.model_spec import ModelSpec
from tasks.servers import SERVE_PORT, services_folder, take_port
from tasks.services.limited_http import LimitedHttp
from tasks.services.request_guard import HOSTS, App, Guard
from tasks.serving import openai_server
from tasks.serving.http_api import Counted, build_app, limit_body_time, read_as_json
from tasks.serving.llama_cpp import LlamaCppProcess
from tasks.serving.metrics import Metrics
from tasks.serving.model_process import ModelProcess
from tasks.serving.openai_server import OpenaiServer
from tasks.serving.page import OPEN_PATHS, example_command, find_paths
from tasks.serving.recorded_rows import RecordedRows
from tasks.serving.served_model import ServedModel
from tasks.serving.vllm import VllmProcess
from tasks.tracking.connection import MlflowFailed
from training.problems import UserError
from training.recipe import split_version_name

BODY_BYTES = 16 * 2**20
"""The longest body of a request."""
TOKEN = "FINETUNE_SERVE_TOKEN"
"""The environment variable with a token in place of the home's."""
DRAIN_S = 30
"""Requests that are not answered so long after SIGTERM are given up."""


class _Transport:
    """A client's connection, to which the head and the body of a response are sent in one piece."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._unsent = transport, list[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends the data, with all others of this turn of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(data)

    def close(self) -> None:
        """Closes the connection after all that was written."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._unsent:
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()


class _Http(LimitedHttp):
    """Limited HTTP whose answers are sent in one piece."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport))  # type: ignore[arg-type]


@dataclass(frozen=True)
class ServeOptions:
    """Options of `finetune serve`."""

    name: str
    alias: str = ""
    """Empty for the champion's."""
    version: str = ""
    task: str = ""
    """The user's own task type, whose code may run."""
    host: str = HOSTS[0]
    port: int = SERVE_PORT
    batch_size: int = 32
    engine: Literal["transformers", "vllm"] = "transformers"
    vllm_arguments: tuple[str, ...] = ()
    format: str = ""
    """Of the export that is served, one of tasks.serving.llama_cpp.SERVED_FORMATS; empty for the model itself."""
    record: Path | None = None
    record_share: float = 1.0
    record_rows: int = 100_000
    fd: int | None = None
    """The descriptor of a socket that listens already, in place of host and port."""


def describe_token() -> str:
    """The place of the token that requests need, as a shell reads it."""
    return f"${TOKEN}" if os.environ.get(TOKEN) else f"$(cat {shlex.quote(str(_token_file()))})"


def _token_file() -> Path:
    """The file with the token of the servers of this home; created if missing."""
    return create_secret(services_folder() / "serve.token", secrets.token_urlsafe(32).encode())


def serve(options: ServeOptions, on_ready: Callable[[str, str], None]) -> None:
    """Serves until SIGTERM or SIGINT, and answers the requests of before.

    `on_ready` is called with the address and a shell command that asks the model, when the server answers. Raises
    UserError, MlflowFailed, and JobFailed if the version cannot be loaded.
    """
    remove_jobs_of_killed_servers()
    with _listen(options) as listening:
        asyncio.run(_serve(options, listening, on_ready))


async def _serve(options: ServeOptions, listening: socket.socket, on_ready: Callable[[str, str], None]) -> None:
    def load(model: ModelSpec, on_end: Callable[[Any], None]) -> Any:
        if options.format:
            return LlamaCppProcess(model, options.format, on_end)
        if options.engine == "vllm":
            return VllmProcess(model, options.vllm_arguments, on_end)
        return ModelProcess(model, options.batch_size, on_end)

    served = ServedModel[Any](options.name, options.alias, options.version, options.task, load, _tell)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    starting = asyncio.create_task(served.start())
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        await starting
    except asyncio.CancelledError:
        return
    finally:
        stopped.cancel()
    assert served.current is not None
    model, metrics = served.current.model, Metrics(served)
    generates, has_template = can_talk(model.task["task"]), True
    if isinstance(served.current, OpenaiServer):
        app = openai_server.build_app(served, metrics, type(served.current))
    else:
        has_template = generates and served.current.has_chat_template
        recorded = _open_records(options, metrics, served.current.model.columns)
        app = build_app(served, metrics, recorded, generates=generates, holds_conversations=has_template)
    host, port = listening.getsockname()[:2]
    server = uvicorn.Server(
        uvicorn.Config(
            Counted(_guarded(limit_body_time(read_as_json(app)), options, port), metrics, find_paths(app)),
            http=_Http,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_S,
            lifespan="off",
            proxy_headers=False,
        )
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]  # they have handlers above
    following = asyncio.create_task(served.follow())
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    stopped = asyncio.create_task(stopping.wait())
    address = f"http://{host}:{port}"
    on_ready(address, example_command(model, address, describe_token(), holds_conversations=has_template))
    try:
        await asyncio.wait({serving, stopped, following}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        if following.done():
            following.result()
    finally:
        following.cancel()
        stopped.cancel()
        await served.stop()


def _guarded(app: App, options: ServeOptions, port: int) -> Guard:
    return Guard(
        app,
        port,
        os.environ.get(TOKEN) or _token_file().read_text().strip(),
        is_open=OPEN_PATHS.__contains__,
        hint="send the header Authorization: Bearer TOKEN; finetune serve prints where the token is",
        is_token=True,
        any_host=options.host not in HOSTS,
        body_bytes=BODY_BYTES,
    )


@contextlib.contextmanager
def _listen(options: ServeOptions) -> Iterator[socket.socket]:
    """The socket that listens. Raises UserError for a port or host that cannot be used."""
    host, port = options.host, options.port
    try:
        if options.fd is not None:
            sockets: tuple[socket.socket, ...] = (socket.socket(fileno=options.fd),)
        else:
            sockets = take_port(port, host)
    except OSError as error:
        message = f"{host}:{port} cannot be used ({error.strerror}): name another port, by --port, or another host."
        raise UserError.of("option", "--port", message) from error
    with contextlib.ExitStack() as opened:
        for one in sockets:
            opened.enter_context(one)
        # asyncio does so only for sockets whose protocol is named; a response would wait 40 ms for an acknowledgement.
        sockets[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sockets[0]


def _open_records(options: ServeOptions, metrics: Metrics, columns: Mapping[str, str]) -> RecordedRows | None:
    """Raises UserError for a folder that cannot be used."""
    if options.record is None:
        return None

    def fail(rows: int, reason: str) -> None:
        if not metrics.unrecorded_rows:
            _tell(f"Rows are not recorded in {options.record}: {reason}. Requests are answered as before.")
        metrics.count_unrecorded(rows)

    try:
        share, most = options.record_share, options.record_rows
        return RecordedRows(options.record, options.name, share, most, fail, columns)
    except OSError as error:
        raise UserError.of("option", "--record", f"{options.record} cannot be used: {error.strerror}.") from error


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Serves on a socket that the process manager has opened."""
    parser = argparse.ArgumentParser(prog="python -m tasks.serving.server")
    parser.add_argument("name")
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args()
    prepare_environment()
    name, alias, version = split_version_name(options.name)
    try:
        serve(ServeOptions(name, alias, version, fd=options.fd), lambda address, command: _tell(f"serves at {address}"))
    except (UserError, JobFailed, MlflowFailed) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
