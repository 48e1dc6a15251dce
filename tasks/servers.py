"""Addresses and login of the services of `finetune up`: the servers of Prefect and MLflow, and the worker, on loopback.

The process manager (tasks/services/process_manager.py) runs them; tasks/services/lifecycle.py starts and stops it.

    <home>/services/process_manager.lock    held by the process manager
    <home>/services/state.json              which services run, and where (ServicesState)
    <home>/services/prefect.password        the passwords of the servers of this home, mode 0600
    <home>/services/mlflow.password
    <home>/services/served/PID.json         the model that a process of `finetune serve` serves (Serving)

Every request to a server of this home needs its password: any local user, and any web page in a browser of this
machine, can connect to a port on loopback. Each server knows its own password alone: Prefect's lets run commands.
Before a password is sent, tasks/loopback.py proves who listens. If PREFECT_API_URL or MLFLOW_TRACKING_URI names
another server, that server is used, and none is started.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.home import create_secret, home, home_path
from tasks.locks import FlockManager, is_held
from tasks.loopback import another_user_listens, check_listener
from training.jobs.processes import start_ticks
from training.jobs.protocol import write_atomically

PREFECT, MLFLOW, WORKER, SERVE = "prefect", "mlflow", "worker", "serve"
VARIABLES = {PREFECT: "PREFECT_API_URL", MLFLOW: "MLFLOW_TRACKING_URI"}
POOL = "finetune"
PREFECT_PORT, MLFLOW_PORT, SERVE_PORT = 4200, 5000, 8000
USER = "finetune"
"""The user name that goes with each password."""
START_TIMEOUT_S = 180.0
LOCK = "process_manager"


class ServicesFailed(Exception):
    """The services did not start or stop; the message is for the user."""


class ServicesState(BaseModel):
    """The services that a process manager runs. An address is None if another server is used."""

    model_config = ConfigDict(frozen=True)

    pid: int
    """Process id of the process manager."""
    host: str = Field(default_factory=socket.gethostname)
    """Machine of the process manager: several machines may share a home."""
    started: datetime = Field(default_factory=lambda: datetime.now(UTC))
    ticks: int = 0
    """Start of the process, in clock ticks since boot: Linux reuses process ids."""
    prefect: str | None
    """http://127.0.0.1:4200"""
    mlflow: str | None
    serve: str | None = None
    """Address of the server of a registered model, which is not awaited: the model may not be registered yet."""
    served_model: str = ""
    """Its name, as `finetune up --serve` had it."""
    answering: tuple[str, ...] = ()
    """The services that have answered so far: prefect, mlflow, worker."""
    stopping: bool = False
    """Whether it stops the runs and the services, as `finetune down` asks."""

    @property
    def services(self) -> list[str]:
        """The services that the process manager runs, in the order of their start."""
        return [*([PREFECT] if self.prefect else []), *([MLFLOW] if self.mlflow else []), WORKER]

    @property
    def here(self) -> bool:
        """Whether the process manager runs on this machine."""
        return self.host == socket.gethostname()

    @property
    def place(self) -> str:
        """The machine and the start time, for messages."""
        return f"on {self.host} since {self.started:%Y-%m-%d %H:%M} UTC"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point a shell at the servers and log it in."""
        return {"FINETUNE_HOME": str(home())} | self.variables(PREFECT) | self.variables(MLFLOW)

    def variables(self, name: str) -> dict[str, str]:
        """The address and the login of one server; empty if another server is used."""
        if name == PREFECT and self.prefect:
            return {VARIABLES[PREFECT]: f"{self.prefect}/api", "PREFECT_API_AUTH_STRING": auth_string()}
        if name == MLFLOW and self.mlflow:
            login = {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": ensure_password(MLFLOW)}
            return {VARIABLES[MLFLOW]: self.mlflow, **login}
        return {}


def take_port(port: int, host: str = "127.0.0.1") -> tuple[socket.socket, ...]:
    """A socket that listens on this port of the host; and one that keeps the port of ::1, where nothing answers then:
    for `localhost`, browsers and ssh try ::1 first, and any user could listen there. Raises OSError if one is taken."""
    listening = socket.create_server((host, port))
    try:
        beside = socket.socket(socket.AF_INET6)
        beside.bind(("::1", listening.getsockname()[1]))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            listening.close()
            raise
        return (listening,)  # no IPv6 on this machine
    return listening, beside


def services_folder() -> Path:
    """<home>/services, created with mode 0700 if missing."""
    folder = home() / "services"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class Serving(BaseModel):
    """A model that a process of `finetune serve` serves."""

    model_config = ConfigDict(frozen=True)

    pid: int = Field(default_factory=os.getpid)
    host: str = Field(default_factory=socket.gethostname)
    ticks: int = Field(default_factory=lambda: start_ticks(os.getpid()))
    """Start of the process, in clock ticks since boot."""
    model: str
    """As the command named it."""
    address: str


def announce_serving(model: str, address: str) -> None:
    """Records for `finetune status` that this process serves the model, until it ends."""
    (services_folder() / "served").mkdir(exist_ok=True)
    serving = Serving(model=model, address=address)
    write_atomically(services_folder() / "served" / f"{serving.pid}.json", serving.model_dump_json().encode())


def list_serving() -> list[Serving]:
    """Lists the models that `finetune serve` serves from this home and machine. Deletes the records of processes that
    have ended."""
    found = []
    for file in sorted((home_path() / "services" / "served").glob("*.json")):
        with contextlib.suppress(OSError, ValidationError):
            serving = Serving.model_validate_json(file.read_bytes())
            if serving.host != socket.gethostname():
                continue
            if start_ticks(serving.pid) == serving.ticks:
                found.append(serving)
            else:
                file.unlink()
    return found


def read_running() -> ServicesState | None:
    """Reads the state of the services of this home; None if no process manager runs."""
    return read_last_state() if is_held(home_path() / "services" / f"{LOCK}.lock") else None


def read_last_state() -> ServicesState | None:
    """Reads the state that a process manager of this home wrote last, whether it still runs or not."""
    try:
        return ServicesState.model_validate_json((home_path() / "services" / "state.json").read_bytes())
    except (OSError, ValidationError):
        return None


def write_state(state: ServicesState) -> None:
    """Writes the state for other processes of this home."""
    write_atomically(services_folder() / "state.json", state.model_dump_json(indent=1).encode())


@contextlib.contextmanager
def process_manager_lock() -> Iterator[bool]:
    """Holds the process manager's lock in the block; yields False if another process holds it."""
    with _lock(LOCK, timeout_s=0) as locked:
        yield locked


@contextlib.contextmanager
def prefect_start_lock() -> Iterator[None]:
    """Keeps two Prefect servers from setting up the database of this home at once."""
    with _lock("prefect-start", START_TIMEOUT_S):
        yield


@contextlib.contextmanager
def _lock(name: str, timeout_s: float) -> Iterator[bool]:
    locks, holder = FlockManager(services_folder()), str(os.getpid())
    locked = locks.acquire_lock(name, holder, acquire_timeout=timeout_s)
    try:
        yield locked
    finally:
        if locked:
            locks.release_lock(name, holder)


def use_home_servers() -> None:
    """Points this process at the servers of this home and logs it in. Call it before prefect or mlflow is imported.

    If the environment already names a server, that server is used, and never gets a password of this home. Servers
    that run on another machine, do not answer yet, or whose port another user has taken, are not used.
    """
    state = read_running()
    if state is None or not state.here:
        return
    for name in (PREFECT, MLFLOW):
        variables = state.variables(name) if name in state.answering else {}
        if not variables or another_user_listens(variables[VARIABLES[name]]):
            continue
        if os.environ.get(VARIABLES[name]) in (None, "", variables[VARIABLES[name]]):
            check_listener(variables[VARIABLES[name]])
            os.environ.update(variables)


def read_on_other_machine() -> ServicesState | None:
    """Reads the state of the services of this home if they run on another machine; otherwise None."""
    state = read_running()
    return None if state is None or state.here else state


def ensure_password(server: str) -> str:
    """Returns the password of a server of this home, prefect or mlflow, which the first call creates. Delete its file
    for a new one."""
    return create_secret(services_folder() / f"{server}.password", secrets.token_urlsafe(24).encode()).read_text()


def auth_string() -> str:
    """User and password of the Prefect server, in the format of Prefect's settings and of the login form of its UI."""
    return f"{USER}:{ensure_password(PREFECT)}"


def is_healthy(url: str) -> bool:
    """Whether the HTTP server at the URL reports that it is healthy. False if another user's process listens there."""
    if another_user_listens(url):
        return False
    with contextlib.suppress(OSError, HTTPException), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False


def worker_name() -> str:
    """The name of this home's worker at the Prefect server."""
    return re.sub("[/%]", "-", f"{socket.gethostname()} {home()}")  # Prefect refuses these two


def worker_is_online(since: datetime) -> bool:
    """Whether this home's worker has sent the Prefect server a heartbeat since then."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            workers = client.read_workers_for_work_pool(POOL)
        except (ObjectNotFound, httpx.HTTPError):
            return False
    heartbeats = [worker.last_heartbeat_time for worker in workers if worker.name == worker_name()]
    return any(time is not None and time > since for time in heartbeats)
