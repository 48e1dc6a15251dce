"""Start, stop and status of the services of `finetune up`: the servers of Prefect and MLflow, and a worker.

The process manager (tasks/services/process_manager.py) runs the services; `up` starts it and `down` stops it. Their
addresses and the files under <home>/services are in tasks/servers.py. The process manager prints to
<home>/services/process_manager.log, each service to <home>/services/NAME/logs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tasks.home import home
from tasks.locks import FlockManager
from tasks.servers import (
    LOCK,
    MLFLOW,
    POOL,
    PREFECT,
    SERVE,
    SERVE_PORT,
    START_TIMEOUT_S,
    VARIABLES,
    WORKER,
    ServicesFailed,
    ServicesState,
    is_healthy,
    read_last_state,
    read_running,
    services_folder,
    take_port,
    use_home_servers,
    worker_is_online,
)
from training.jobs.processes import send, start_ticks
from training.jobs.search_path import start_variables
from training.problems import Problem, UserError

STOP_TIMEOUT_S = 90.0
"""Time for runs to save a checkpoint and then for the servers to end."""
HEARTBEATS_S = 100.0
"""Three intervals between heartbeats of a worker: one heartbeat may be lost."""


def up(
    prefect_port: int,
    mlflow_port: int,
    detach: bool,
    on_answer: Callable[[str, ServicesState], None],
    *,
    served_model: str = "",
    serve_port: int = SERVE_PORT,
) -> ServicesState:
    """Starts the process manager, waits until all services answer, and calls `on_answer` for each.

    Unless detached, the process manager stops when this process ends, even if it is killed.
    Raises UserError for ports in use. Raises ServicesFailed, after it has stopped all, if a service does not start.
    """
    ports = {
        name: port for name, port in ((PREFECT, prefect_port), (MLFLOW, mlflow_port)) if not _names_other_server(name)
    }
    ports |= {SERVE: serve_port} if served_model else {}
    _require_free(ports)
    log = services_folder() / f"{LOCK}.log"
    argv = [sys.executable, "-m", "tasks.services.process_manager", *(f"{name}={port}" for name, port in ports.items())]
    argv += [] if detach else ["--until-eof"]
    argv += ["--serve", served_model] if served_model else []
    # This process holds the pipe's other end open until it ends, even if it ends by a closed terminal or SIGKILL.
    read_end, _ = os.pipe()
    with open(log, "wb") as truncated, open(log, "ab") as out:
        truncated.close()
        manager = subprocess.Popen(
            argv, stdin=read_end, stdout=out, stderr=out, env=_build_environment(), start_new_session=True
        )
    os.close(read_end)
    try:
        return _wait_for_services(manager, log, on_answer)
    except BaseException:
        # Not `down`: a process manager that has just started does not hold its lock yet.
        manager.terminate()
        manager.wait()
        raise


def _wait_for_services(
    manager: subprocess.Popen[bytes], log: Path, on_answer: Callable[[str, ServicesState], None]
) -> ServicesState:
    deadline, answered = time.monotonic() + START_TIMEOUT_S, 0
    while True:
        state = read_last_state()
        if state is not None and state.pid == manager.pid:
            for name in state.answering[answered:]:
                on_answer(name, state)
            answered = len(state.answering)
            if answered == len(state.services):
                return state
        if manager.poll() is not None:
            raise ServicesFailed(f"the services did not start: {_read_last_line(log)} The whole log: {log}")
        if time.monotonic() > deadline:
            raise ServicesFailed(_describe_wait(state))
        time.sleep(0.1)


def _describe_wait(state: ServicesState | None) -> str:
    """Names the service that did not answer, with the last line of its log."""
    missing = [name for name in (state.services if state else ()) if state and name not in state.answering]
    if not missing:
        return f"the services did not begin within {START_TIMEOUT_S:g} s: see {services_folder()}"
    logs = sorted((services_folder() / missing[0] / "logs").glob("*.log"), key=lambda log: log.stat().st_mtime_ns)
    line = _read_last_line(logs[-1]) if logs else "it has no log."
    folder = logs[-1].parent if logs else services_folder()
    return f"{missing[0]} did not answer within {START_TIMEOUT_S:g} s: {line} Its logs: {folder}"


def down() -> bool:
    """Stops the process manager and its services; runs save a checkpoint first. Returns False if none runs.

    Raises ServicesFailed if the services do not end, or run on another machine.
    """
    state = read_running()
    if state is None:
        return False
    if not state.here:
        raise ServicesFailed(f"`finetune up` over this home runs {state.place}: run `finetune down` there.")
    if start_ticks(state.pid) == state.ticks:
        send(state.pid, signal.SIGTERM)
    if not FlockManager(services_folder()).wait_for_lock(LOCK, timeout=STOP_TIMEOUT_S):
        raise ServicesFailed(
            f"the services did not end within {STOP_TIMEOUT_S:g} s: see {services_folder() / f'{LOCK}.log'}"
        )
    while state.ticks and start_ticks(state.pid) == state.ticks:  # the process releases the lock just before it ends
        time.sleep(0.02)
    return True


def status(state: ServicesState) -> list[tuple[str, str, bool]]:
    """Returns each service's name, its address or work pool, and whether it answers now."""
    servers = []
    if state.prefect:
        servers.append((PREFECT, state.prefect, is_healthy(f"{state.prefect}/api")))
    if state.mlflow:
        servers.append((MLFLOW, state.mlflow, is_healthy(state.mlflow)))
    use_home_servers()
    since = datetime.now(UTC) - timedelta(seconds=HEARTBEATS_S)
    prefect_answers = all(answers for name, _, answers in servers if name == PREFECT)
    served = [(f"{SERVE} {state.served_model}", state.serve, is_healthy(state.serve))] if state.serve else []
    return [*servers, (WORKER, f"work pool {POOL}", prefect_answers and worker_is_online(since)), *served]


def _names_other_server(name: str) -> bool:
    """Whether the environment names a server that is not of this home."""
    url, last = os.environ.get(VARIABLES[name]), read_last_state()
    return bool(url) and not (last and url == last.environment.get(VARIABLES[name]))


def _build_environment() -> dict[str, str]:
    """This process's environment without the addresses of an earlier `finetune up`."""
    dropped = {variable for name, variable in VARIABLES.items() if not _names_other_server(name)}
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return inherited | {"FINETUNE_HOME": str(home())} | start_variables()


def _require_free(ports: dict[str, int]) -> None:
    problems = []
    for name, port in ports.items():
        message = ""
        if not 0 <= port < 2**16:
            message = f"{port} is no port: give 0 to 65535."
        elif twin := next((other for other, its in ports.items() if other != name and its == port != 0), None):
            message = f"port {port} is that of --{twin}-port too: name another."
        else:
            try:
                for taken in take_port(port):
                    taken.close()
            except OSError as error:
                message = f"port {port} cannot be used ({os.strerror(error.errno or 0)}): name another."
                if name in VARIABLES:
                    message += f" If your {name} server listens there, name its address in {VARIABLES[name]} to use it."
        if message:
            problems.append(Problem(kind="option", where=f"--{name}-port", message=message))
    if problems:
        raise UserError(problems)


def _read_last_line(log: Path) -> str:
    """The log's last line that says something: Prefect adds one to a traceback that does not."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line != "An exception occurred."), "it printed nothing.")
