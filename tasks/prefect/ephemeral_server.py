"""The Prefect server of a single run, started if the run has no other server; it ends with the run.

It shares one database in the home with the server of `finetune up`, unless the user names another database.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tasks.environment import PREFECT_SERVER, server_environment
from tasks.home import home, home_path
from tasks.loopback import check_listener
from tasks.prefect import servers
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
    if other := servers.read_on_other_machine():
        message = f"`finetune up` over this home runs {other.place}: run there, or name a server that both reach."
        raise UserError.of("option", "PREFECT_API_URL", message)
    login: dict[Any, Any] = {PREFECT_API_AUTH_STRING: servers.auth_string()}
    with servers.prefect_start_lock():
        state = servers.read_running()
        if state is not None and state.prefect and servers.PREFECT in state.answering:
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
        [sys.executable, "-m", "tasks.prefect.prefect_server", str(port), f"--fd={descriptor}", "--for-one-run"],
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
        if servers.is_healthy(url):
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
