"""The servers of `finetune up`: Prefect's, MLflow's and a worker, on loopback, over what the home folder holds.

One program, the keeper (tasks/programs/keeper.py), owns them: it starts them, starts one again that ends, and is what
`finetune down` stops.

    <home>/services/keeper.lock  held by the keeper
    <home>/services/state.json   what runs where (State)
    <home>/services/keeper.log   what the keeper prints; that of the services is in NAME/logs

A server that PREFECT_API_URL or MLFLOW_TRACKING_URI names is somebody else's: it is used, and none is started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.runtime import settings
from tasks.runtime.locks import FlockManager, held
from training.problems import Problem, UserError
from training.processes import send, start_ticks
from training.protocol import write_atomically

PREFECT, MLFLOW, WORKER = "prefect", "mlflow", "worker"
VARIABLES = {PREFECT: "PREFECT_API_URL", MLFLOW: "MLFLOW_TRACKING_URI"}
POOL = "finetune"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000
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
    def environment(self) -> dict[str, str]:
        """What points a shell at them."""
        found = {"FINETUNE_HOME": str(settings.home())}
        if self.prefect:
            found[VARIABLES[PREFECT]] = f"{self.prefect}/api"
        if self.mlflow:
            found[VARIABLES[MLFLOW]] = self.mlflow
        return found


def folder() -> Path:
    """<home>/services, made where missing."""
    found = settings.home() / "services"
    found.mkdir(exist_ok=True)
    return found


def running() -> State | None:
    """What the keeper told last; None where none runs."""
    return told() if held(settings.home_path() / "services" / "keeper.lock") else None


def use() -> None:
    """Points this process at what runs over this home, but for what the environment names already.

    Call it before prefect or mlflow is imported.
    """
    if (state := running()) is not None:
        for name, value in state.environment.items():
            os.environ.setdefault(name, value)


def told() -> State | None:
    """What the last keeper told, whether it runs or not."""
    try:
        return State.model_validate_json((settings.home_path() / "services" / "state.json").read_bytes())
    except (OSError, ValidationError):
        return None


def tell(state: State) -> None:
    """Stores it for whoever asks."""
    write_atomically(folder() / "state.json", state.model_dump_json(indent=1).encode())


def up(prefect_port: int, mlflow_port: int, say: Callable[[str, State], None]) -> State:
    """Starts the keeper, and waits until each service answers; `say` hears of each that does.

    Raises UserError for ports that are taken, and ServicesFailed, with all stopped again, where one does not start.
    """
    ports = {name: port for name, port in ((PREFECT, prefect_port), (MLFLOW, mlflow_port)) if not _named(name)}
    _need_free(ports)
    log = folder() / "keeper.log"
    argv = [sys.executable, "-m", "tasks.programs.keeper", *(f"{name}={port}" for name, port in ports.items())]
    with open(log, "wb") as out:
        keeper = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_environment(), start_new_session=True
        )
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

    Raises ServicesFailed where it does not end.
    """
    state = running()
    if state is None:
        return False
    if start_ticks(state.pid):
        send(state.pid, signal.SIGTERM)
    if not FlockManager(folder()).wait_for_lock("keeper", timeout=STOP_TIMEOUT_S):
        raise ServicesFailed(f"the services did not end within {STOP_TIMEOUT_S:g} s: see {folder() / 'keeper.log'}")
    while start_ticks(state.pid):  # it lets go of the lock last but one
        time.sleep(0.02)
    return True


def answers(url: str) -> bool:
    """Whether an HTTP server says that it is well."""
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
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
