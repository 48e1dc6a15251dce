"""The Prefect server of a run that has none: started for the run, gone with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tasks.runtime.locks import FlockManager
from training.processes import die_with_parent

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 5.0


# Undone when the process ends; a server must outlive Prefect's own clean-up, which sends it the last log lines.
_for_this_process = contextlib.ExitStack()


def ensure_prefect_server() -> str:
    """The URL of the server that the settings name, or of one on loopback that lives as long as this process.

    Prefect would start one itself, but in this process's group: a Ctrl-C would end it before the run could tell it
    anything, and a SIGKILL of this process would leave it running. This one is in a session of its own and dies
    with this process. Its history is kept in Prefect's own database.
    Call it from the main thread: the server is tied to the thread that starts it.
    Raises RuntimeError where it does not start.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_UI_ENABLED, temporary_settings

    named = PREFECT_API_URL.value()
    if named:
        return str(named)
    with _one_at_a_time(PREFECT_HOME.value()):
        port = _free_port()
        server = _start(port)
        atexit.register(_stop, server)
        url = f"http://127.0.0.1:{port}/api"
        _wait_for(url, server)
    _for_this_process.enter_context(temporary_settings({PREFECT_API_URL: url, PREFECT_UI_ENABLED: False}))
    return url


@contextlib.contextmanager
def _one_at_a_time(prefect_home: Path) -> Iterator[None]:
    """Two servers that set up a fresh database at once would get in each other's way, and one would end."""
    locks, holder = FlockManager(prefect_home), str(os.getpid())
    held = locks.acquire_lock("finetune-server", holder, acquire_timeout=START_TIMEOUT_S)
    try:
        yield
    finally:
        if held:
            locks.release_lock("finetune-server", holder)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _start(port: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "critical", "--lifespan", "on"]
    # What Prefect sets for a server of its own that serves one process and no UI.
    env = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    return subprocess.Popen(
        argv,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        if server.poll() is not None:
            raise RuntimeError(
                f"the Prefect server ended with exit code {server.returncode}: try `prefect server start`"
            )
        time.sleep(0.05)
    raise RuntimeError(f"the Prefect server did not answer within {START_TIMEOUT_S:g} s at {url}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
