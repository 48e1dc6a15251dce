"""The servers of `finetune up`: Prefect's, MLflow's and a worker, on loopback, over what the home folder holds.

One program, the keeper (tasks/services/process_manager.py), owns them: it starts them, starts one again that ends, and
is what `finetune down` stops.

    <home>/services/keeper.lock  held by the keeper
    <home>/services/state.json   what runs where (State)
    <home>/services/keeper.log   what the keeper prints; that of the services is in NAME/logs
    <home>/services/password     the password of the servers of this home, mode 0600

Every request to a server of this home needs the password: any local user, and any web page in a browser of this
machine, can connect to a port on loopback. A server that PREFECT_API_URL or MLFLOW_TRACKING_URI names is somebody
else's: it is used, and none is started.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.cache import settings
from tasks.cache.locks import FlockManager, held
from tasks.cache.secret_files import made_once
from training.jobs.processes import send, start_ticks
from training.jobs.protocol import write_atomically
from training.problems import Problem, UserError

PREFECT, MLFLOW, WORKER = "prefect", "mlflow", "worker"
VARIABLES = {PREFECT: "PREFECT_API_URL", MLFLOW: "MLFLOW_TRACKING_URI"}
POOL = "finetune"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000
USER = "finetune"
"""The user name that goes with the password."""
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 90.0
"""For runs to save a checkpoint, then for the servers to end."""
MISSED_S = 100.0
"""Of three heartbeats of a worker."""


class ServicesFailed(Exception):
    """The services did not start or stop; the message is for the user."""


class State(BaseModel):
    """What the keeper tells. An address is None where the server is somebody else's."""

    model_config = ConfigDict(frozen=True)

    pid: int
    host: str = Field(default_factory=socket.gethostname)
    """The machine that the keeper runs on: several may see one home."""
    started: datetime = Field(default_factory=lambda: datetime.now(UTC))
    ticks: int = 0
    """When the process started, by the machine's own clock: a process id alone is used again."""
    prefect: str | None
    """http://127.0.0.1:4200"""
    mlflow: str | None
    answering: tuple[str, ...] = ()
    """The services that have answered: prefect, mlflow, worker."""

    @property
    def kept(self) -> list[str]:
        """The services that the keeper starts, in this order."""
        return [*([PREFECT] if self.prefect else []), *([MLFLOW] if self.mlflow else []), WORKER]

    @property
    def here(self) -> bool:
        """Whether the keeper runs on this machine."""
        return self.host == socket.gethostname()

    @property
    def place(self) -> str:
        """The machine and the start time, for messages."""
        return f"on {self.host} since {self.started:%Y-%m-%d %H:%M} UTC"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point a shell at the servers and log it in."""
        found = {"FINETUNE_HOME": str(settings.home())}
        for name in (PREFECT, MLFLOW):
            found |= self.variables(name)
        return found

    def variables(self, name: str) -> dict[str, str]:
        """The address of one server and what its clients log in with; empty for a server that is not kept."""
        if name == PREFECT and self.prefect:
            return {VARIABLES[PREFECT]: f"{self.prefect}/api", "PREFECT_API_AUTH_STRING": auth_string()}
        if name == MLFLOW and self.mlflow:
            login = {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": password()}
            return {VARIABLES[MLFLOW]: self.mlflow, **login}
        return {}


def folder() -> Path:
    """<home>/services, made with mode 0700 where missing."""
    found = settings.home() / "services"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def running() -> State | None:
    """What the keeper told last; None where none runs."""
    return told() if held(settings.home_path() / "services" / "keeper.lock") else None


def use() -> None:
    """Points this process at the servers of this home and logs it in.

    A server that the environment names already is left alone, and never given the password of this home. Servers that
    run on another machine, or do not answer yet, are not used. Call it before prefect or mlflow is imported.
    """
    state = running()
    if state is None or not state.here:
        return
    for name in (PREFECT, MLFLOW):
        variables = state.variables(name) if name in state.answering else {}
        if variables and another_user_listens(variables[VARIABLES[name]]):
            variables = {}
        if os.environ.get(VARIABLES[name]) in (None, "", variables.get(VARIABLES[name])):
            os.environ.update(variables)


def elsewhere() -> State | None:
    """The services of this home, if they run on another machine."""
    state = running()
    return None if state is None or state.here else state


def password() -> str:
    """The password of the servers of this home, made at the first call. Delete its file for a new one."""
    return made_once(folder() / "password", secrets.token_urlsafe(24).encode()).read_text()


def auth_string() -> str:
    """User and password as Prefect takes them, in its settings and in the form of its UI."""
    return f"{USER}:{password()}"


@contextlib.contextmanager
def one_server_starts() -> Iterator[None]:
    """Keeps two Prefect servers from setting up the database of this home at once."""
    with _exclusive("prefect-start", START_TIMEOUT_S):
        yield


@contextlib.contextmanager
def _exclusive(name: str, timeout_s: float | None = None) -> Iterator[None]:
    locks, holder = FlockManager(folder()), str(os.getpid())
    held_now = locks.acquire_lock(name, holder, acquire_timeout=timeout_s)
    try:
        yield
    finally:
        if held_now:
            locks.release_lock(name, holder)


def told() -> State | None:
    """What the last keeper told, whether it runs or not."""
    try:
        return State.model_validate_json((settings.home_path() / "services" / "state.json").read_bytes())
    except (OSError, ValidationError):
        return None


def tell(state: State) -> None:
    """Stores it for whoever asks."""
    write_atomically(folder() / "state.json", state.model_dump_json(indent=1).encode())


def up(prefect_port: int, mlflow_port: int, detach: bool, say: Callable[[str, State], None]) -> State:
    """Starts the keeper, and waits until each service answers; `say` hears of each that does.

    Unless detached, the keeper stops when this process ends, however it ends.
    Raises UserError for ports that are taken, and ServicesFailed, with all stopped again, where one does not start.
    """
    ports = {name: port for name, port in ((PREFECT, prefect_port), (MLFLOW, mlflow_port)) if not _named(name)}
    _need_free(ports)
    log = folder() / "keeper.log"
    argv = [sys.executable, "-m", "tasks.services.process_manager", *(f"{name}={port}" for name, port in ports.items())]
    argv += [] if detach else ["--until-eof"]
    # The end of this pipe stays open for as long as this process lives: also a closed terminal or SIGKILL ends it.
    read_end, _ = os.pipe()
    with open(log, "wb") as truncated, open(log, "ab") as out:
        truncated.close()
        keeper = subprocess.Popen(
            argv, stdin=read_end, stdout=out, stderr=out, env=_environment(), start_new_session=True
        )
    os.close(read_end)
    try:
        return _all_answering(keeper, log, say)
    except BaseException:
        # By its pid: one that has just begun does not hold its lock yet.
        keeper.terminate()
        keeper.wait()
        raise


def _all_answering(keeper: subprocess.Popen[bytes], log: Path, say: Callable[[str, State], None]) -> State:
    deadline, answering = time.monotonic() + START_TIMEOUT_S, 0
    while True:
        state = told()
        if state is not None and state.pid == keeper.pid:
            for name in state.answering[answering:]:
                say(name, state)
            answering = len(state.answering)
            if answering == len(state.kept):
                return state
        if keeper.poll() is not None:
            raise ServicesFailed(f"the services did not start: {_last_line(log)} All of it: {log}")
        if time.monotonic() > deadline:
            raise ServicesFailed(f"not all services answered within {START_TIMEOUT_S:g} s: see {folder()}")
        time.sleep(0.1)


def down() -> bool:
    """Stops the keeper and all that it keeps; runs save a checkpoint first. False where none runs.

    Raises ServicesFailed where it does not end, or runs on another machine.
    """
    state = running()
    if state is None:
        return False
    if not state.here:
        raise ServicesFailed(f"`finetune up` over this home runs {state.place}: run `finetune down` there.")
    if start_ticks(state.pid) == state.ticks:
        send(state.pid, signal.SIGTERM)
    if not FlockManager(folder()).wait_for_lock("keeper", timeout=STOP_TIMEOUT_S):
        raise ServicesFailed(f"the services did not end within {STOP_TIMEOUT_S:g} s: see {folder() / 'keeper.log'}")
    while state.ticks and start_ticks(state.pid) == state.ticks:  # it lets go of the lock last but one
        time.sleep(0.02)
    return True


def answers(url: str) -> bool:
    """Whether an HTTP server says that it is well. One of another user at a port of ours does not count: it waits to be
    sent the password."""
    if another_user_listens(url):
        return False
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False


def another_user_listens(url: str) -> bool:
    """Whether a process of another user, root apart, has the URL's port on this machine. The kernel tells on Linux."""
    port = urllib.parse.urlsplit(url).port
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                listens = state == "0A" and int(local.rpartition(":")[2], 16) == port
                if listens and int(uid) not in (0, os.getuid()):
                    return True
    return False


def look(state: State) -> list[tuple[str, str, bool]]:
    """Name and place of each service that is kept, and whether it answers now."""
    found = []
    if state.prefect:
        found.append((PREFECT, state.prefect, answers(f"{state.prefect}/api")))
    if state.mlflow:
        found.append((MLFLOW, state.mlflow, answers(state.mlflow)))
    use()
    missed = datetime.now(UTC) - timedelta(seconds=MISSED_S)
    reached = all(well for name, _, well in found if name == PREFECT)
    return [*found, (WORKER, f"work pool {POOL}", reached and works(missed))]


def worker_name() -> str:
    """What the worker of this home is called at the Prefect server."""
    return f"{socket.gethostname()} {settings.home()}".replace("/", "-")


def works(since: datetime) -> bool:
    """Whether this home's worker has told the Prefect server, since then, that it takes runs."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            found = client.read_workers_for_work_pool(POOL)
        except (ObjectNotFound, httpx.HTTPError):
            return False
    beats = [one.last_heartbeat_time for one in found if one.name == worker_name()]
    return any(beat is not None and beat > since for beat in beats)


@contextlib.contextmanager
def kept_alone() -> Iterator[bool]:
    """Holds the keeper's lock in the block; gives False where another has it."""
    locks, holder = FlockManager(folder()), str(os.getpid())
    alone = locks.acquire_lock("keeper", holder, acquire_timeout=0)
    try:
        yield alone
    finally:
        if alone:
            locks.release_lock("keeper", holder)


def _named(name: str) -> bool:
    """Whether the environment names a server of somebody else's."""
    value, last = os.environ.get(VARIABLES[name]), told()
    return bool(value) and not (last and value == last.environment.get(VARIABLES[name]))


def _environment() -> dict[str, str]:
    """This one, without the addresses that are given anew."""
    dropped = {variable for name, variable in VARIABLES.items() if not _named(name)}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"FINETUNE_HOME": str(settings.home())}


def _need_free(ports: dict[str, int]) -> None:
    problems = []
    for name, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                message = (
                    f"port {port} cannot be used ({error.strerror}): name another, or, where that is a server to "
                    f"use, its address in {VARIABLES[name]}."
                )
                problems.append(Problem(kind="option", where=f"--{name}-port", message=message))
    if problems:
        raise UserError(problems)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing."]
    return lines[-1]
