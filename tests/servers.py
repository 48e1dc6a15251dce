"""Real servers on loopback that can die and come back at their address."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


class Server:
    """A program in a process group of its own; `health` is a path that answers when it is ready."""

    def __init__(self, health: str, argv: list[str], env: dict[str, str]) -> None:
        port = closed_port()
        self.url = f"http://127.0.0.1:{port}"
        self._health = self.url + health
        self._argv = [sys.executable, "-m", *argv, "--host", "127.0.0.1", "--port", str(port)]
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            self._argv, env=self._env, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def wait(self, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            assert time.monotonic() < deadline, f"{self._health} does not answer"
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._health, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


def closed_port() -> int:
    """A port on which nothing listens, below those that Linux gives to whoever wants any: nobody gets it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


def mlflow_server(folder: Path, fresh_database: Path) -> Server:
    """Its database is server.db in the folder, at first a copy of an empty one, with the experiment of a new server."""
    shutil.copyfile(fresh_database, folder / "server.db")
    with contextlib.closing(sqlite3.connect(folder / "server.db")) as database, database:
        database.execute("UPDATE experiments SET artifact_location = 'mlflow-artifacts:/0'")
    # As `mlflow server` starts it, without the seconds that its command line takes.
    argv = ["uvicorn", "mlflow.server.fastapi_app:app", "--log-level", "critical"]
    env = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder / 'server.db'}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    return Server("/health", argv, env)


def prefect_server(folder: Path) -> Server:
    argv = ["uvicorn", "--factory", "prefect.server.api.server:create_app", "--log-level", "critical"]
    database = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'prefect.db'}"}
    return Server("/api/health", argv, {"PREFECT_UI_ENABLED": "0", **database})
