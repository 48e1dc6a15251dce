"""The commands for the servers of this machine: `up`, `status`, `down`, `doctor`."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Sequence

from flows.cli.runs import tabulate_runs
from flows.cli.shared import COMPLETED, FAILED
from flows.reports.tables import align, terminal_width, wrap
from tasks import servers
from tasks.reports.formatting import format_count
from tasks.servers import MLFLOW_PORT, PREFECT_PORT, SERVE_PORT, ServicesState
from tasks.services import lifecycle
from tasks.services.doctor import Finding, run_checks
from tasks.tracking.mlflow_run import list_runs
from training.problems import UserError

LEVEL = len("warning")
MIN_TEXT_WIDTH = 40
RUNS_SHOWN = 5


def add_up_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--detach", action="store_true", help="return as soon as all answer, and leave them running")
    parser.add_argument("--prefect-port", type=int, default=PREFECT_PORT, help=f"default: {PREFECT_PORT}")
    parser.add_argument("--mlflow-port", type=int, default=MLFLOW_PORT, help=f"default: {MLFLOW_PORT}")
    parser.add_argument(
        "--serve", metavar="NAME", default="", help="also serve this model over HTTP, as soon as it is registered"
    )
    parser.add_argument("--serve-port", type=int, default=SERVE_PORT, help=f"default: {SERVE_PORT}")


def up(arguments: argparse.Namespace) -> int:
    """Start Prefect, MLflow and a worker for deployments on this machine."""
    state = servers.read_running()
    if state is not None:
        print(f"They run already, {state.place}; `finetune down` stops them.")
        print(*_format_addresses(state), sep="\n")
        return COMPLETED
    print("starting Prefect, MLflow and a worker: about 20 seconds", file=sys.stderr)
    state = lifecycle.up(
        arguments.prefect_port,
        arguments.mlflow_port,
        arguments.detach,
        _print_answer,
        served_model=arguments.serve,
        serve_port=arguments.serve_port,
    )
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
    addresses |= {"Serve": f"{state.serve}, {state.served_model}" if state.serve else None}
    return [f"{f'{name}:':<9}{address}" for name, address in addresses.items() if address]


def format_logins(state: ServicesState) -> list[str]:
    """Formats the login to the page of each server."""
    logins = []
    if state.prefect:
        logins.append(f"Log in to Prefect: {servers.auth_string()}")
    if state.mlflow:
        logins.append(f"Log in to MLflow:  user {servers.USER}, password {servers.ensure_password(servers.MLFLOW)}")
    return logins


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="show the last runs of this recipe, and whether its model is served"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--env", action="store_true", help='print export lines: eval "$(finetune status --env)"')
    output.add_argument("--password", action="store_true", help="print the login to the pages of both servers")


def status(arguments: argparse.Namespace) -> int:
    """Show which servers of `finetune up` run, and which models `finetune serve` serves, and where.

    With NAME, shows the last runs of a recipe instead. With --env, prints the environment variables that connect a
    shell to the servers; with --password, the login. The exit code is 0 if all servers of `finetune up` answer.
    """
    if arguments.name is not None and (arguments.env or arguments.password):
        raise UserError.of("option", "NAME", "is for runs of a recipe: leave it out, or --env and --password.")
    state = servers.read_running()
    served = [
        (f"serve {one.model}", one.address, servers.is_healthy(one.address))
        for one in servers.list_serving()
        if arguments.name in (None, re.split("[@/]", one.model)[0])
    ]
    if arguments.name is not None:
        print(*tabulate_runs(list_runs(arguments.name, RUNS_SHOWN)), *_format_status(served), sep="\n")
        return COMPLETED
    if state is None:
        if not arguments.env:
            print(*_format_status(served), "Nothing of `finetune up` runs over this home.", sep="\n")
        return FAILED
    if not state.here:
        print(f"`finetune up` of this home runs {state.place}: run this command there.", file=sys.stderr)
        return FAILED
    if arguments.password:
        print(*format_logins(state), sep="\n")
        return COMPLETED
    if arguments.env:
        print(*(f"export {name}={shlex.quote(value)}" for name, value in state.environment.items()), sep="\n")
        return COMPLETED
    rows = lifecycle.status(state)
    print(*_format_status([*rows, *served]), sep="\n")
    return COMPLETED if all(answers for _, _, answers in rows) else FAILED


def _format_status(rows: Sequence[tuple[str, str, bool]]) -> list[str]:
    return align([[name, place, "answers" if answers else "does not answer"] for name, place, answers in rows])


def down(arguments: argparse.Namespace) -> int:
    """Stop the servers and the worker of `finetune up`. Runs save a checkpoint first."""
    print("Stopped." if lifecycle.down() else "Nothing of `finetune up` runs over this home.")
    return COMPLETED


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine and its servers, and print how to solve each problem. Leaves nothing behind."""
    findings = run_checks()
    subject_width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(*_format_finding(finding, subject_width), sep="\n")
    levels = [finding.level for finding in findings]
    counts = [format_count(levels.count(level), level) for level in ("problem", "warning") if level in levels]
    print(", ".join(counts) or "All is well.")
    return FAILED if "problem" in levels else COMPLETED


def _format_finding(finding: Finding, subject_width: int) -> list[str]:
    """Formats `problem  home  finding`, wrapped, and below it the next step behind an arrow."""
    start = f"{finding.level:<{LEVEL}}  {finding.subject:<{subject_width}}  "
    width, indent = max(terminal_width(), len(start) + MIN_TEXT_WIDTH), " " * len(start)
    return wrap(finding.found, width, start, indent) + wrap(finding.next_step, width, f"{indent}→ ", f"{indent}  ")
