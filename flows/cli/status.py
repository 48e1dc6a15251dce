"""Show which servers of `finetune up` run, and where.

With --env, prints the environment variables that connect a shell to the servers; with --password, the login.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from flows.cli.shared import COMPLETED, FAILED
from flows.cli.up import format_logins
from flows.reports.tables import align
from tasks.prefect import servers
from tasks.services import lifecycle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--env", action="store_true", help='print export lines: eval "$(finetune status --env)"')
    output.add_argument("--password", action="store_true", help="print the login to the pages of both servers")


def execute(arguments: argparse.Namespace) -> int:
    """Prints a line for each service; returns FAILED unless all answer."""
    state = servers.read_running()
    if state is None:
        if not arguments.env:
            print("Nothing of `finetune up` runs over this home.")
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
    lines = [[name, place, "answers" if answers else "does not answer"] for name, place, answers in rows]
    print(*align(lines), sep="\n")
    return COMPLETED if all(answers for _, _, answers in rows) else FAILED
