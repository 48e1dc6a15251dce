"""`finetune promote NAME VERSION`: makes a version the champion, whatever the gate says."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli.codes import COMPLETED
from tasks.registry import promotions


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("promote", help="make a version the champion", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="a registered model")
    parser.add_argument("version", metavar="VERSION", help="the number of its version")
    add_why(parser)
    parser.add_argument("--alias", metavar="ALIAS", help="give it this alias rather than the champion's")
    return parser


def add_why(parser: argparse.ArgumentParser) -> None:
    """--why"""
    parser.add_argument("--why", metavar="TEXT", default="", help="the reason, kept with the move")


def act(arguments: argparse.Namespace) -> int:
    """Says what was done. Raises UserError for names that are not there."""
    print(promotions.promote(arguments.name, arguments.version, arguments.why, arguments.alias))
    return COMPLETED
