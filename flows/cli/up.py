"""`finetune up`: Prefect's server and UI, MLflow, and a worker that runs deployments, all on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from flows.cli.codes import COMPLETED, sigterm_interrupts
from tasks.prefect import servers
from tasks.prefect.servers import MLFLOW_PORT, PREFECT_PORT, State
from tasks.services import lifecycle

HOW_TO_LOG_IN = "Both pages ask for a password: finetune status --password"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("up", help="start servers and a worker on this machine", description=__doc__)
    parser.add_argument("--detach", action="store_true", help="return when all answer, and leave them running")
    parser.add_argument("--prefect-port", type=int, default=PREFECT_PORT, help=f"default: {PREFECT_PORT}")
    parser.add_argument("--mlflow-port", type=int, default=MLFLOW_PORT, help=f"default: {MLFLOW_PORT}")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Starts them, or says that they run. Raises UserError for ports that are taken, ServicesFailed where one fails."""
    state = servers.running()
    if state is not None:
        print(f"They run already, {state.place}; `finetune down` stops them.")
        print(*addresses(state), sep="\n")
        return COMPLETED
    print("starting Prefect, MLflow and a worker: some 20 seconds", file=sys.stderr)
    with sigterm_interrupts():
        state = lifecycle.up(arguments.prefect_port, arguments.mlflow_port, arguments.detach, _say)
        try:
            print(*addresses(state), sep="\n", flush=True)
            # A password belongs on a person's terminal, not in a log.
            print(*(logins(state) if sys.stdout.isatty() else [HOW_TO_LOG_IN]), sep="\n", flush=True)
            if arguments.detach:
                print('Point a shell at them: eval "$(finetune status --env)". Stop them: finetune down')
                return COMPLETED
            print("Ctrl-C stops them.", flush=True)
            while servers.running():
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("stopping; runs save a checkpoint first", file=sys.stderr)
            lifecycle.down()
    return COMPLETED


def _say(name: str, state: State) -> None:
    print(f"  {name} answers", file=sys.stderr, flush=True)


def addresses(state: State) -> list[str]:
    """A line a server."""
    found = {"Prefect": state.prefect, "MLflow": state.mlflow, "Worker": f"work pool {servers.POOL!r}"}
    return [f"{f'{name}:':<9}{where}" for name, where in found.items() if where]


def logins(state: State) -> list[str]:
    """How a person logs in to the pages of the servers, a line each."""
    found = []
    if state.prefect:
        found.append(f"Log in to Prefect: {servers.auth_string()}")
    if state.mlflow:
        found.append(f"Log in to MLflow:  user {servers.USER}, password {servers.password()}")
    return found
