"""The program that keeps the services of `finetune up` running:

    python -m tasks.services.process_manager [--until-eof] [NAME=PORT ...]

It starts each service when the one before answers, each under a supervisor (training/jobs/supervise.py) that lets none
of its processes outlive it or this program, and starts one again that ends. On SIGTERM it stops all: the runs first,
which save a checkpoint, then the worker, then the servers; with `--until-eof` also when its standard input ends, which
a foreground `finetune up` holds open.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import select
import signal
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
    MLFLOW,
    POOL,
    PREFECT,
    USER,
    WORKER,
    State,
    answers,
    folder,
    kept_alone,
    one_server_starts,
    password,
    tell,
    worker_name,
    works,
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
"""Of each service, one log a start."""
# A password is compared with a slow hash, 50 ms each: an answer is kept for a minute.
MLFLOW_AUTH = """[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///{database}
auth_cache_ttl_seconds = 60
"""


@dataclass
class Service:
    """One program, started again whenever it ends."""

    name: str
    argv: list[str]
    environment: Callable[[], dict[str, str]]
    """Made anew at each start."""
    ready: Callable[[], bool]
    supervisor: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started: float = 0.0

    def start(self) -> None:
        """Runs it; what it prints is in services/NAME/logs."""
        place = folder() / self.name
        place.mkdir(exist_ok=True)
        supervise = [sys.executable, "-m", "training.jobs.supervise", "--grace-s", str(SERVER_STOP_S), str(place), "--"]
        self.supervisor = subprocess.Popen(
            [*supervise, sys.executable, "-m", *self.argv],
            env=os.environ | self.environment(),
            stdin=subprocess.PIPE,  # held open by this program: its end is the end of the service
            start_new_session=True,
        )
        self.starts, self.started = self.starts + 1, time.monotonic()

    def keep(self) -> None:
        """Starts it again where it has ended, sooner after a long life than after a short one."""
        if self.supervisor is None or self.supervisor.poll() is None:
            return
        lived = time.monotonic() - self.started
        pause = 1.0 if lived > 2 * LONGEST_PAUSE_S else min(2.0**self.starts, LONGEST_PAUSE_S)
        if lived > pause:
            print(f"{self.name} ended with exit code {self.supervisor.returncode}: starting it again.", flush=True)
            self.start()

    def stop(self) -> None:
        """Ends it, and returns when nothing is left of it."""
        if self.supervisor is not None:
            self.supervisor.terminate()
            self.supervisor.wait()


class Keeper:
    """All services, from the first start to the last end."""

    def __init__(self, ports: dict[str, int], until_eof: bool) -> None:
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        pid = os.getpid()
        self._state = State(pid=pid, ticks=start_ticks(pid), prefect=urls.get(PREFECT), mlflow=urls.get(MLFLOW))
        self._services = [service for service in _services(ports) if service.name in self._state.kept]
        self._until_eof = until_eof
        self._stopping = False
        self._trim_at = 0.0

    def run(self) -> None:
        """Until it is asked to stop."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        os.environ.update(self._state.environment)
        tell(self._state)
        try:
            for service in self._services:
                if service.name == WORKER:
                    _put_in_order(ours=self._state.prefect is not None)
                with one_server_starts() if service.name == PREFECT else contextlib.nullcontext():
                    service.start()
                    while not self._stopping and not service.ready():
                        self._keep()
                if self._stopping:
                    return
                self._state = self._state.model_copy(update={"answering": (*self._state.answering, service.name)})
                tell(self._state)
            while not self._stopping:
                self._keep()
        finally:
            _end_runs()
            for service in reversed(self._services):
                service.stop()

    def _keep(self) -> None:
        for service in self._services:
            service.keep()
        if time.monotonic() > self._trim_at:
            with contextlib.suppress(OSError):
                trim_logs(folder())
            self._trim_at = time.monotonic() + TRIM_EVERY_S
        if self._until_eof and select.select([0], [], [], TICK_S)[0]:  # nobody writes: it is readable at its end
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
    for log in (*services.glob("*/logs/*.log"), services / "keeper.log"):
        if log.exists() and log.stat().st_size > LOG_BYTES:
            with open(log, "r+b") as opened:
                opened.seek(-LOG_BYTES // 2, os.SEEK_END)
                last = opened.read()
                opened.seek(0)
                opened.write(last)
                opened.truncate()  # the service appends: its next line comes behind this


def _services(ports: dict[str, int]) -> list[Service]:
    prefect, mlflow = ports.get(PREFECT, 0), ports.get(MLFLOW, 0)
    store = ["--host", "127.0.0.1", "--backend-store-uri", f"sqlite:///{settings.home() / 'mlflow.db'}"]
    store += ["--artifacts-destination", str(settings.mlflow_artifacts())]
    worker = worker_name()
    return [
        Service(
            PREFECT,
            ["tasks.prefect.prefect_server", str(prefect)],
            dict,
            partial(answers, f"http://127.0.0.1:{prefect}/api"),
        ),
        Service(
            MLFLOW,
            ["mlflow", "server", "--app-name", "basic-auth", "--workers", "1", *store, "--port", str(mlflow)],
            partial(_mlflow_environment, mlflow),
            partial(answers, f"http://127.0.0.1:{mlflow}"),
        ),
        Service(
            WORKER,
            ["prefect", "--no-prompt", "worker", "start", "--pool", POOL, "--type", "process", "--name", worker],
            lambda: {"PREFECT_WORKER_QUERY_SECONDS": "2"},
            partial(works, datetime.now(UTC)),
        ),
    ]


def _mlflow_environment(port: int) -> dict[str, str]:
    """The variables with which MLflow's server asks for the password and refuses foreign hosts and origins."""
    connection.follow_home()
    place = folder() / MLFLOW
    place.mkdir(exist_ok=True)
    # MLflow keeps a hash of the password and never looks at a new one: its list of users is made anew each time.
    for left in place.glob("users.db*"):
        left.unlink()
    (place / "users.db").touch(mode=0o600)
    configuration = place / "auth.ini"
    configuration.write_text(MLFLOW_AUTH.format(database=place / "users.db"))
    hosts = ("127.0.0.1", "localhost")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(configuration),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password(),
        "MLFLOW_BASIC_AUTH_FAIL_CLOSED": "true",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_urlsafe(24),
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(name for host in hosts for name in (host, f"{host}:*")),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}:{port}" for host in hosts),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _put_in_order(ours: bool) -> None:
    """Tells the server of runs that died with an earlier worker of this home; one that is ours crashes what dies from
    now on. Without either, runs run."""
    from prefect.client.orchestration import get_client

    from tasks.prefect import automations, flow_runs, pending_states

    try:
        pending_states.tell()
        flow_runs.tell_killed()
        if ours:
            with get_client(sync_client=True) as client:
                automations.crash_silent_runs(client)
    except Exception as error:
        print(f"the Prefect server was not told of runs that died, or how to find them: {error}", flush=True)


def _end_runs() -> None:
    """Asks each flow run to end; it saves a checkpoint, and tells the servers, which are still there."""
    runs = {pid: variable(pid, FLOW_RUN) for pid in descendants(os.getpid())}
    first: dict[str, int] = {}
    for pid, run in runs.items():  # parents come before children: what a run has started, it stops by itself
        if run:
            first.setdefault(run, pid)
    for pid in first.values():
        send(pid, signal.SIGTERM)
    deadline = time.monotonic() + RUNS_STOP_S
    while set(first.values()) & set(descendants(os.getpid())) and time.monotonic() < deadline:
        time.sleep(TICK_S)


def main() -> None:
    """Keeps them until it is stopped. Ends with 1 where another keeper has this home."""
    settings.prepare_environment()
    with kept_alone() as held:
        if not held:
            sys.exit("another `finetune up` runs over this home: stop it by `finetune down`.")
        parser = argparse.ArgumentParser(prog="python -m tasks.services.process_manager")
        parser.add_argument("--until-eof", action="store_true")
        parser.add_argument("port", nargs="*", metavar="NAME=PORT")
        options = parser.parse_args()
        ports = dict(argument.split("=") for argument in options.port)
        Keeper({name: int(port) for name, port in ports.items()}, options.until_eof).run()


if __name__ == "__main__":
    main()
