"""The process manager of `finetune up`: the program that keeps its services running.

    python -m tasks.services.process_manager [--until-eof] [NAME=PORT ...]

It starts each service once the one before answers, and restarts a service that ends. Each runs under a supervisor
(training/jobs/supervise.py) that lets none of its processes outlive it or this program. On SIGTERM all is stopped: the
runs first, which save a checkpoint, then the worker, then the servers. With `--until-eof` the end of standard input,
which a foreground `finetune up` holds open, has the same effect.

The socket of Prefect's server is bound here and handed on at each start. So its port is never free while the server
restarts, and no other user's process can listen there and be sent the password. MLflow's server takes no socket: for
the seconds of its restart its port is free.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tasks.cache import settings
from tasks.prefect.servers import (
    LOCK,
    MLFLOW,
    POOL,
    PREFECT,
    USER,
    WORKER,
    State,
    ensure_password,
    is_healthy,
    prefect_start_lock,
    process_manager_lock,
    services_folder,
    worker_is_online,
    worker_name,
    write_state,
)
from tasks.tracking import connection
from training.jobs.processes import descendants, send, start_ticks, variable

TICK_S = 0.2
RUNS_STOP_S = 40.0
SERVER_STOP_S = 10.0
LONGEST_PAUSE_S = 30.0
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
TRIM_EVERY_S = 60.0
LOG_BYTES = 10_000_000
"""A longer log is cut to its last half."""
LOGS_KEPT = 5
"""Logs of each service, one a start."""
# Comparing a password takes a slow hash of 50 ms: the result is cached for a minute.
MLFLOW_AUTH = """[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///{database}
auth_cache_ttl_seconds = 60
"""


@dataclass
class Service:
    """One program, restarted whenever it ends."""

    name: str
    argv: list[str]
    environment: Callable[[], dict[str, str]]
    """Called at each start."""
    ready: Callable[[], bool]
    sockets: tuple[socket.socket, ...] = ()
    """Handed on to the program at each start, under the same descriptors."""
    supervisor: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started: float = 0.0

    def start(self) -> None:
        """Starts the program; its output goes to services/NAME/logs."""
        place = services_folder() / self.name
        place.mkdir(exist_ok=True)
        supervise = [sys.executable, "-m", "training.jobs.supervise", "--grace-s", str(SERVER_STOP_S), str(place), "--"]
        self.supervisor = subprocess.Popen(
            [*supervise, sys.executable, "-m", *self.argv],
            env=os.environ | self.environment(),
            stdin=subprocess.PIPE,  # this program holds the other end open: when it ends, the service ends
            pass_fds=[listening.fileno() for listening in self.sockets],
            start_new_session=True,
        )
        self.starts, self.started = self.starts + 1, time.monotonic()

    def restart_if_ended(self) -> None:
        """Restarts the program if it has ended, sooner after a long life than after a short one."""
        if self.supervisor is None or self.supervisor.poll() is None:
            return
        lived = time.monotonic() - self.started
        pause = 1.0 if lived > 2 * LONGEST_PAUSE_S else min(2.0**self.starts, LONGEST_PAUSE_S)
        if lived > pause:
            print(f"{self.name} ended with exit code {self.supervisor.returncode}: restarting it.", flush=True)
            self.start()

    def stop(self) -> None:
        """Stops the program and returns once none of its processes is left."""
        if self.supervisor is not None:
            self.supervisor.terminate()
            self.supervisor.wait()


class ProcessManager:
    """All services, from the first start to the last end."""

    def __init__(self, ports: dict[str, int], until_eof: bool) -> None:
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        pid = os.getpid()
        self._state = State(pid=pid, ticks=start_ticks(pid), prefect=urls.get(PREFECT), mlflow=urls.get(MLFLOW))
        self._services = [service for service in _build_services(ports) if service.name in self._state.services]
        self._until_eof = until_eof
        self._stopping = False
        self._trim_at = 0.0

    def run(self) -> None:
        """Runs the services until a signal or the end of standard input."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        os.environ.update(self._state.environment)
        write_state(self._state)
        try:
            for service in self._services:
                if service.name == WORKER:
                    _report_dead_runs(own_server=self._state.prefect is not None)
                with prefect_start_lock() if service.name == PREFECT else contextlib.nullcontext():
                    service.start()
                    while not self._stopping and not service.ready():
                        self._tick()
                if self._stopping:
                    return
                self._state = self._state.model_copy(update={"answering": (*self._state.answering, service.name)})
                write_state(self._state)
            while not self._stopping:
                self._tick()
        finally:
            _stop_runs()
            for service in reversed(self._services):
                service.stop()

    def _tick(self) -> None:
        for service in self._services:
            service.restart_if_ended()
        if time.monotonic() > self._trim_at:
            with contextlib.suppress(OSError):
                trim_logs(services_folder())
            self._trim_at = time.monotonic() + TRIM_EVERY_S
        if self._until_eof and select.select([0], [], [], TICK_S)[0]:  # readable at its end only
            self._stopping = True
        elif not self._until_eof:
            time.sleep(TICK_S)

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True


def trim_logs(services: Path) -> None:
    """Removes old logs of the services and cuts long ones."""
    for logs in services.glob("*/logs"):
        starts = sorted((log for log in logs.glob("*.log") if log.stem.isdigit()), key=lambda log: int(log.stem))
        for old in starts[:-LOGS_KEPT]:
            old.unlink()
    for log in (*services.glob("*/logs/*.log"), services / f"{LOCK}.log"):
        if log.exists() and log.stat().st_size > LOG_BYTES:
            with open(log, "r+b") as opened:
                opened.seek(-LOG_BYTES // 2, os.SEEK_END)
                last = opened.read()
                opened.seek(0)
                opened.write(last)
                opened.truncate()  # the service appends: its next line follows


def _build_services(ports: dict[str, int]) -> list[Service]:
    prefect, mlflow = ports.get(PREFECT, 0), ports.get(MLFLOW, 0)
    store = ["--host", "127.0.0.1", "--backend-store-uri", f"sqlite:///{settings.home() / 'mlflow.db'}"]
    store += ["--artifacts-destination", str(settings.mlflow_artifacts())]
    worker = worker_name()
    listening = [socket.create_server(("127.0.0.1", prefect))] if prefect else []
    return [
        Service(
            PREFECT,
            ["tasks.prefect.prefect_server", str(prefect), *(f"--fd={one.fileno()}" for one in listening)],
            dict,
            partial(is_healthy, f"http://127.0.0.1:{prefect}/api"),
            tuple(listening),
        ),
        Service(
            MLFLOW,
            ["mlflow", "server", "--app-name", "basic-auth", "--workers", "1", *store, "--port", str(mlflow)],
            partial(_prepare_mlflow, mlflow),
            partial(is_healthy, f"http://127.0.0.1:{mlflow}"),
        ),
        Service(
            WORKER,
            ["prefect", "--no-prompt", "worker", "start", "--pool", POOL, "--type", "process", "--name", worker],
            lambda: {"PREFECT_WORKER_QUERY_SECONDS": "2"},
            partial(worker_is_online, datetime.now(UTC)),
        ),
    ]


def _prepare_mlflow(port: int) -> dict[str, str]:
    """The variables that have MLflow's server require the password and refuse foreign hosts and origins."""
    connection.update_artifact_paths()
    place = services_folder() / MLFLOW
    place.mkdir(exist_ok=True)
    # MLflow stores a hash of the first password and ignores a new one: its list of users is made anew at each start.
    for left in place.glob("users.db*"):
        left.unlink()
    (place / "users.db").touch(mode=0o600)
    configuration = place / "auth.ini"
    configuration.write_text(MLFLOW_AUTH.format(database=place / "users.db"))
    hosts = ("127.0.0.1", "localhost")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(configuration),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": ensure_password(),
        "MLFLOW_BASIC_AUTH_FAIL_CLOSED": "true",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_urlsafe(24),
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(name for host in hosts for name in (host, f"{host}:*")),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}:{port}" for host in hosts),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _report_dead_runs(own_server: bool) -> None:
    """Reports the runs that died with an earlier worker of this home to the Prefect server, and has a server of our own
    crash those that die from now on. An error is printed: runs work without either."""
    from prefect.client.orchestration import get_client

    from tasks.prefect import automations, flow_runs, pending_states

    try:
        pending_states.deliver()
        flow_runs.report_killed()
        if own_server:
            with get_client(sync_client=True) as client:
                automations.create_crash_automation(client)
    except Exception as error:
        print(f"runs that died could not be reported to the Prefect server: {error}", flush=True)


def _stop_runs() -> None:
    """Stops each flow run: it saves a checkpoint and reports its end to the servers, which still run."""
    runs = {pid: variable(pid, FLOW_RUN) for pid in descendants(os.getpid())}
    first: dict[str, int] = {}
    for pid, run in runs.items():  # parents come before children: a run stops its own children
        if run:
            first.setdefault(run, pid)
    for pid in first.values():
        send(pid, signal.SIGTERM)
    deadline = time.monotonic() + RUNS_STOP_S
    while set(first.values()) & set(descendants(os.getpid())) and time.monotonic() < deadline:
        time.sleep(TICK_S)


def main() -> None:
    """Runs the services until it is stopped. Exits with 1 if another process manager has this home."""
    settings.prepare_environment()
    with process_manager_lock() as alone:
        if not alone:
            sys.exit("another `finetune up` runs over this home: stop it with `finetune down`.")
        parser = argparse.ArgumentParser(prog="python -m tasks.services.process_manager")
        parser.add_argument("--until-eof", action="store_true")
        parser.add_argument("port", nargs="*", metavar="NAME=PORT")
        options = parser.parse_args()
        ports = dict(argument.split("=") for argument in options.port)
        ProcessManager({name: int(port) for name, port in ports.items()}, options.until_eof).run()


if __name__ == "__main__":
    main()
