"""`finetune rollback NAME`: makes the champion before this one champion again; done twice, it goes back twice."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli.codes import COMPLETED
from flows.cli.promote import add_why
from tasks.registry import promotions


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("rollback", help="go back to the champion before this one", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="a registered model")
    add_why(parser)
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Says what was done. Raises UserError where there is none to go back to."""
    print(promotions.roll_back(arguments.name, arguments.why))
    return COMPLETED
