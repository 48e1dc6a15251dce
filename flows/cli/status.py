"""`finetune status`: what of `finetune up` runs, and where; `--env` prints what points a shell at it and logs it in,
`--password` how a person logs in to the pages."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from flows.cli.codes import COMPLETED, FAILED
from flows.cli.up import logins
from flows.reports.tables import aligned
from tasks.prefect import servers
from tasks.services import lifecycle


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser
    parser = commands.add_parser("status", help="what of up runs, and where", description=__doc__)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--env", action="store_true", help='print export lines: eval "$(finetune status --env)"')
    only.add_argument("--password", action="store_true", help="print how to log in to the pages of both servers")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints a line a service; gives FAILED unless all answer."""
    state = servers.running()
    if state is None:
        if not arguments.env:
            print("Nothing of `finetune up` runs over this home.")
        return FAILED
    if not state.here:
        print(f"`finetune up` over this home runs {state.place}: ask there.", file=sys.stderr)
        return FAILED
    if arguments.password:
        print(*logins(state), sep="\n")
        return COMPLETED
    if arguments.env:
        print(*(f"export {name}={shlex.quote(value)}" for name, value in state.environment.items()), sep="\n")
        return COMPLETED
    rows = lifecycle.status(state)
    print(*aligned([[name, where, "answers" if well else "does not answer"] for name, where, well in rows]), sep="\n")
    return COMPLETED if all(well for _, _, well in rows) else FAILED
