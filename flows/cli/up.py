"""Start Prefect, MLflow and a worker for deployments on this machine."""

from __future__ import annotations

import argparse
import sys
import time

from flows.cli.shared import COMPLETED
from tasks.prefect import servers
from tasks.prefect.servers import MLFLOW_PORT, PREFECT_PORT, ServicesState
from tasks.services import lifecycle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--detach", action="store_true", help="return as soon as all answer, and leave them running")
    parser.add_argument("--prefect-port", type=int, default=PREFECT_PORT, help=f"default: {PREFECT_PORT}")
    parser.add_argument("--mlflow-port", type=int, default=MLFLOW_PORT, help=f"default: {MLFLOW_PORT}")


def execute(arguments: argparse.Namespace) -> int:
    """Starts the services unless they run. Raises UserError for ports in use, ServicesFailed if a service fails."""
    state = servers.read_running()
    if state is not None:
        print(f"They run already, {state.place}; `finetune down` stops them.")
        print(*_format_addresses(state), sep="\n")
        return COMPLETED
    print("starting Prefect, MLflow and a worker: about 20 seconds", file=sys.stderr)
    state = lifecycle.up(arguments.prefect_port, arguments.mlflow_port, arguments.detach, _print_answer)
    try:
        print(*_format_addresses(state), sep="\n", flush=True)
        # A password belongs on a person's terminal, not in a log.
        hint = ["Both pages need a password: finetune status --password"]
        print(*(format_logins(state) if sys.stdout.isatty() else hint), sep="\n", flush=True)
        if arguments.detach:
            print('Point a shell at them: eval "$(finetune status --env)". Stop them: finetune down')
            return COMPLETED
        print("Ctrl-C stops them.", flush=True)
        while servers.read_running():
            time.sleep(0.5)
    except KeyboardInterrupt:
        print("stopping; runs save a checkpoint first", file=sys.stderr)
        lifecycle.down()
    return COMPLETED


def _print_answer(name: str, state: ServicesState) -> None:
    print(f"  {name} answers", file=sys.stderr, flush=True)


def _format_addresses(state: ServicesState) -> list[str]:
    addresses = {"Prefect": state.prefect, "MLflow": state.mlflow, "Worker": f"work pool {servers.POOL!r}"}
    return [f"{f'{name}:':<9}{address}" for name, address in addresses.items() if address]


def format_logins(state: ServicesState) -> list[str]:
    """Formats the login to the page of each server."""
    logins = []
    if state.prefect:
        logins.append(f"Log in to Prefect: {servers.auth_string()}")
    if state.mlflow:
        logins.append(f"Log in to MLflow:  user {servers.USER}, password {servers.ensure_password(servers.MLFLOW)}")
    return logins
