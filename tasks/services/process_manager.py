"""The process manager of `finetune up`: the program that keeps its services running.

    python -m tasks.services.process_manager [--until-eof] [--serve MODEL] [NAME=PORT ...]

It starts each service when the previous one answers, and restarts a service that ends. Each service runs under a
supervisor (training/jobs/supervise.py), which ends all processes of the service when the supervisor or this program
ends. On SIGTERM this program stops the runs first, which save a checkpoint, then the worker, then the servers. With
`--until-eof`, the end of standard input does the same; a foreground `finetune up` holds standard input open.

This program binds the ports of the servers, and passes the sockets to all services at each start. So a port is never
free while its server restarts, and no process of another user can listen there and receive the password. If this
program is killed, the supervisors keep the ports until they have ended their services, the worker's runs among them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tasks.environment_variables import PREFECT_SERVER, prepare_environment, server_environment
from tasks.loopback import check_listener
from tasks.servers import (
    LOCK,
    MLFLOW,
    POOL,
    PREFECT,
    SERVE,
    WORKER,
    ServicesState,
    is_healthy,
    prefect_start_lock,
    process_manager_lock,
    services_folder,
    take_port,
    worker_is_online,
    worker_name,
    write_state,
)
from tasks.services.container_init import stop_runs
from training.jobs.processes import start_ticks

TICK_S = 0.2
SERVER_STOP_S = 10.0
SERVE_STOP_S = 40.0
"""A served model answers the requests that it has."""
LONGEST_PAUSE_S = 30.0
TRIM_EVERY_S = 60.0
LOG_BYTES = 10_000_000
"""A longer log is cut to its last half."""
LOGS_KEPT = 5
"""Number of logs that are kept for each service; each start has its own."""


@dataclass
class Service:
    """A program that is restarted when it ends."""

    name: str
    argv: list[str]
    environment: Callable[[], dict[str, str]]
    """Builds the whole environment for a start."""
    ready: Callable[[], bool]
    sockets: tuple[socket.socket, ...] = ()
    """Passed to the supervisor and the program at each start, with the same descriptors."""
    grace_s: float = SERVER_STOP_S
    """Seconds to end after a request to stop."""
    supervisor: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started: float = 0.0

    def start(self) -> None:
        """Starts the program in a folder of its own, with its output in NAME/logs. Uvicorn would import files of
        the working directory, and Prefect read settings there."""
        job = services_folder() / self.name
        job.mkdir(exist_ok=True)
        supervise = [sys.executable, "-m", "training.jobs.supervise", "--grace-s", str(self.grace_s), str(job), "--"]
        self.supervisor = subprocess.Popen(
            [*supervise, sys.executable, "-m", *self.argv],
            env=self.environment(),
            cwd=job,
            stdin=subprocess.PIPE,  # the end of this program closes the pipe, which ends the service
            pass_fds=[listening.fileno() for listening in self.sockets],
            start_new_session=True,
        )
        self.starts, self.started = self.starts + 1, time.monotonic()

    def restart_if_ended(self) -> None:
        """Restarts the program if it has ended. The pause between starts grows while the program ends soon."""
        if self.supervisor is None or self.supervisor.poll() is None:
            return
        since_start_s = time.monotonic() - self.started
        pause_s = 1.0 if since_start_s > 2 * LONGEST_PAUSE_S else min(2.0**self.starts, LONGEST_PAUSE_S)
        if since_start_s > pause_s:
            print(f"{self.name} ended with exit code {self.supervisor.returncode}: restarting it.", flush=True)
            self.start()

    def stop(self) -> None:
        """Stops the program, and returns when all of its processes have ended."""
        if self.supervisor is not None:
            self.supervisor.terminate()
            self.supervisor.wait()


class ProcessManager:
    """All services of a home, which it starts, restarts and stops."""

    def __init__(self, ports: dict[str, int], served_model: str, until_eof: bool, temporary: str) -> None:
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        pid = os.getpid()
        self._state = ServicesState(
            pid=pid,
            ticks=start_ticks(pid),
            prefect=urls.get(PREFECT),
            mlflow=urls.get(MLFLOW),
            serve=urls.get(SERVE),
            served_model=served_model,
        )
        self._services = _build_services(ports, temporary, served_model)
        self._until_eof = until_eof
        self._stopping = False
        self._trim_at = 0.0

    def run(self) -> None:
        """Runs the services until a signal or the end of standard input."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        os.environ.update(self._state.environment)
        for url in filter(None, (self._state.prefect, self._state.mlflow)):
            check_listener(url)
        write_state(self._state)
        (services_folder() / "password").unlink(missing_ok=True)  # both servers' in homes of earlier versions
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
                if service.name in self._state.services:
                    self._state = self._state.model_copy(update={"answering": (*self._state.answering, service.name)})
                    write_state(self._state)
            while not self._stopping:
                self._tick()
        finally:
            self._state = self._state.model_copy(update={"stopping": True})
            with contextlib.suppress(OSError):  # a full disk
                write_state(self._state)
            stop_runs()
            for service in reversed(self._services):
                service.stop()

    def _tick(self) -> None:
        for service in self._services:
            service.restart_if_ended()
        if time.monotonic() > self._trim_at:
            with contextlib.suppress(OSError):
                trim_logs(services_folder())
            self._trim_at = time.monotonic() + TRIM_EVERY_S
        if self._until_eof and select.select([0], [], [], TICK_S)[0]:  # nothing is written to it: readable at its end
            self._stopping = True
        elif not self._until_eof:
            time.sleep(TICK_S)

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True


def trim_logs(services: Path) -> None:
    """Removes old logs of the services and shortens long ones."""
    for folder in services.glob("*/logs"):
        logs = sorted((log for log in folder.glob("*.log") if log.stem.isdigit()), key=lambda log: int(log.stem))
        for old in logs[:-LOGS_KEPT]:
            old.unlink()
    for log in (*services.glob("*/logs/*.log"), services / f"{LOCK}.log"):
        if log.exists() and log.stat().st_size > LOG_BYTES:
            with open(log, "r+b") as file:
                file.seek(-LOG_BYTES // 2, os.SEEK_END)
                last_half = file.read()
                file.seek(0)
                file.write(last_half)
                file.truncate()  # the service appends, so its next line follows the last half


def _build_services(ports: Mapping[str, int], temporary: str, served_model: str = "") -> list[Service]:
    taken = {name: take_port(port) for name, port in ports.items()}
    sockets = tuple(one for of_port in taken.values() for one in of_port)
    services = [
        Service(
            name,
            [program, str(ports[name]), f"--fd={taken[name][0].fileno()}"],
            partial(server_environment, variables),
            partial(is_healthy, f"http://127.0.0.1:{ports[name]}{api}"),
            sockets=sockets,
        )
        for name, program, variables, api in (
            (PREFECT, "tasks.services.prefect_server", PREFECT_SERVER, "/api"),
            (MLFLOW, "tasks.services.mlflow_server", (), ""),
        )
        if name in ports
    ]
    worker = ["prefect", "--no-prompt", "worker", "start", "--pool", POOL, "--type", "process", "--name", worker_name()]
    return [
        *services,
        Service(
            WORKER,
            worker,
            lambda: os.environ | {"PREFECT_WORKER_QUERY_SECONDS": "2", "TMPDIR": temporary},
            partial(worker_is_online, datetime.now(UTC)),
            sockets=sockets,
        ),
        *(
            Service(
                SERVE,
                ["tasks.serving.server", served_model, f"--fd={taken[SERVE][0].fileno()}"],
                # It fetches models from MLflow or a bucket, and needs no Prefect.
                lambda: {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
                lambda: True,
                sockets,
                SERVE_STOP_S,
            )
            for _ in range(SERVE in ports)
        ),
    ]


def _report_dead_runs(own_server: bool) -> None:
    """Reports runs that were killed with an earlier worker of this home to the Prefect server. If the server is this
    home's, also creates the automation that crashes dead runs. An error is only printed, as runs need neither."""
    from prefect.client.orchestration import get_client

    from tasks.prefect import automations, flow_runs

    try:
        flow_runs.deliver_final_states()
        flow_runs.report_killed()
        if own_server:
            with get_client(sync_client=True) as client:
                automations.create_crash_automation(client)
    except Exception as error:
        print(f"runs that died could not be reported to the Prefect server: {error}", flush=True)


def main() -> None:
    """Runs the services until it is stopped. Exits with 1 if another process manager runs in this home."""
    prepare_environment()
    with process_manager_lock() as locked:
        if not locked:
            sys.exit("another `finetune up` runs over this home: stop it with `finetune down`.")
        parser = argparse.ArgumentParser(prog="python -m tasks.services.process_manager")
        parser.add_argument("--until-eof", action="store_true")
        parser.add_argument("--serve", metavar="MODEL", default="")
        parser.add_argument("port", nargs="*", metavar="NAME=PORT")
        options = parser.parse_args()
        ports = dict(argument.split("=") for argument in options.port)
        # Prefect's worker uses a folder of a fixed name in the one for temporary files, where it may be another user's.
        with tempfile.TemporaryDirectory(prefix="finetune-", ignore_cleanup_errors=True) as temporary:
            numbers = {name: int(port) for name, port in ports.items()}
            ProcessManager(numbers, options.serve, options.until_eof, temporary).run()


if __name__ == "__main__":
    main()
