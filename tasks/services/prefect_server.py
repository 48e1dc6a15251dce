"""The Prefect server of one home, on loopback: its program, and its start for a run that has no other server.

    python -m tasks.services.prefect_server PORT --fd N [--for-one-run]

The parent process binds the port and passes the socket as a descriptor: `finetune up` (tasks/services), or a run, with
which the server ends. Both servers use one database in the home, unless the user names another one. The guard
(tasks/services/request_guard.py) decides which requests reach the server: they need its password. The pages themselves
need none, as they hold no data.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.database_templates import create_database
from tasks.environment_variables import PREFECT_SERVER, prepare_environment, server_environment
from tasks.home import home, home_path
from tasks.loopback import check_listener
from tasks.servers import (
    PREFECT,
    auth_string,
    ensure_password,
    is_healthy,
    prefect_start_lock,
    read_on_other_machine,
    read_running,
)
from tasks.services.request_guard import HOSTS, Guard, serve
from training.jobs.processes import die_with_parent
from training.jobs.search_path import start_variables
from training.problems import UserError

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 5.0
SQLITE = "sqlite+aiosqlite:///"

# Closed when the process ends: Prefect's clean-up still sends the last log lines to the server.
_for_this_process = contextlib.ExitStack()


def ensure_prefect_server(meanwhile: Callable[[], None] = lambda: None) -> str:
    """Returns the URL of a Prefect server: the one that the settings name, that of `finetune up`, or a new one, which
    ends with this process. Calls `meanwhile` while a new server starts.

    Prefect would start a server in this process's group: Ctrl-C would end it before the run could report its state, and
    SIGKILL of this process would leave it running. The server started here has its own session and ends with this
    process. It keeps its history in the database of the home, and requires the password of the home's Prefect server.
    Call this from the main thread: the server ends with the thread that starts it.
    Raises RuntimeError if the server does not start, and UserError if another machine runs this home's server.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_UI_ENABLED, temporary_settings

    if url := PREFECT_API_URL.value():
        return str(url)
    if other := read_on_other_machine():
        message = f"`finetune up` over this home runs {other.place}: run there, or name a server that both reach."
        raise UserError.of("option", "PREFECT_API_URL", message)
    login: dict[Any, Any] = {PREFECT_API_AUTH_STRING: auth_string()}
    with prefect_start_lock():
        state = read_running()
        if state is not None and state.prefect and PREFECT in state.answering:
            # `finetune up` was still starting its server when this process started.
            url = f"{state.prefect}/api"
            check_listener(url)
        else:
            url = _start_and_wait(meanwhile)
            login |= {PREFECT_UI_ENABLED: False}
    _for_this_process.enter_context(temporary_settings({PREFECT_API_URL: url, **login}))
    return url


def database_url() -> str:
    """The URL of the database of this home's Prefect servers: the one that the user's environment or Prefect profile
    names, otherwise a file in the home, so that no home sees another's runs."""
    from prefect.settings import get_current_settings

    database = get_current_settings().server.database
    url = database.connection_url.get_secret_value() if database.connection_url else ""
    if url and database.model_fields_set & {"connection_url", "driver", "password"}:
        return url
    return f"{SQLITE}{home_path() / 'prefect' / 'prefect.db'}"


def _start_and_wait(meanwhile: Callable[[], None]) -> str:
    """Starts a server, waits until it answers, and returns its URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    server = _start_server(port, listening.fileno())
    # As long as this process has the socket, no other user can listen on the port.
    threading.Thread(target=_close_at_end, args=(server, listening), daemon=True).start()
    atexit.register(_stop_server, server)
    meanwhile()
    url = f"http://127.0.0.1:{port}/api"
    check_listener(url)
    _wait_for(url, server)
    return url


def _close_at_end(server: subprocess.Popen[bytes], listening: socket.socket) -> None:
    server.wait()
    listening.close()  # requests fail at once


def _start_server(port: int, descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.services.prefect_server", str(port), f"--fd={descriptor}", "--for-one-run"],
        env={**server_environment(PREFECT_SERVER), "FINETUNE_HOME": str(home()), **start_variables()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[descriptor],
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if is_healthy(url):
            return
        if server.poll() is not None:
            raise RuntimeError(
                f"the Prefect server ended with exit code {server.returncode}: try `prefect server start`"
            )
        time.sleep(0.05)
    raise RuntimeError(f"the Prefect server did not answer within {START_TIMEOUT_S:g} s at {url}")


def _stop_server(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def main() -> None:
    """Parses the command line and runs the server until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m tasks.services.prefect_server")
    parser.add_argument("port", type=int)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket that is bound to the port")
    parser.add_argument("--for-one-run", action="store_true", help="without UI and background services")
    options = parser.parse_args()
    gc.set_threshold(20_000)  # as in flows/cli/main.py: the imports take a tenth longer with the default
    prepare_environment()
    _configure_prefect(options.port, options.for_one_run)
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    server_settings = get_current_settings().server
    started = serve(
        Guard(create_app(), options.port, ensure_password(PREFECT), is_open=_is_open, websockets=True),
        socket.socket(fileno=options.fd),
        timeout_keep_alive=server_settings.api.keepalive_timeout,
        ws_ping_interval=server_settings.api.websocket_ping_interval,
        ws_ping_timeout=server_settings.api.websocket_ping_timeout,
        log_level="critical" if options.for_one_run else server_settings.logging_level.lower(),
    )
    if not started:
        sys.exit(1)


def _is_open(path: str) -> bool:
    """Pages without data, and health checks."""
    return not f"{path}/".startswith("/api/") or path in ("/api/health", "/api/ready")


def _configure_prefect(port: int, for_one_run: bool) -> None:
    """Configures Prefect by environment variables of this process, so that no list of processes shows the password."""
    os.environ |= {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_AUTH_STRING": auth_string(),
        "PREFECT_SERVER_API_AUTH_STRING": auth_string(),
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}:{port}" for host in HOSTS),
        "PREFECT__SERVER_FINAL": "1",
    }
    if for_one_run:
        os.environ |= {
            "PREFECT_SERVER_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            # The server of `finetune up` registers the types of blocks that its UI offers. Memoized, it would not.
            "PREFECT_API_BLOCKS_REGISTER_ON_START": "0",
            "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "0",
        }
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    url = database_url()
    in_home = url != PREFECT_API_DATABASE_CONNECTION_URL.value()
    if in_home:
        os.environ["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = url
        # Prefect's cache of the blocks in its database: each database needs its own.
        os.environ["PREFECT_SERVER_MEMO_STORE_PATH"] = str(home() / "prefect" / "memo_store.toml")
    refresh_global_settings_context()
    if in_home:
        _create_database(Path(url.removeprefix(SQLITE)))


def _create_database(file: Path) -> None:
    """Creates the database in the home if it is missing. The server would migrate it there, which takes seconds."""
    import prefect

    file.parent.mkdir(mode=0o700, exist_ok=True)
    if not file.exists():
        create_database(file, f"prefect-{prefect.__version__}", _migrate)


def _migrate(file: Path) -> None:
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.database.dependencies import provide_database_interface, temporary_database_config

    async def migrate() -> None:
        database = provide_database_interface()
        await database.create_db()
        await (await database.engine()).dispose()

    with temporary_database_config(AioSqliteConfiguration(f"{SQLITE}{file}")):
        asyncio.run(migrate())


if __name__ == "__main__":
    main()
