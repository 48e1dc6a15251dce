"""Make a registered version the champion, regardless of the gate."""

from __future__ import annotations

import argparse

from flows.cli.shared import COMPLETED
from tasks.registry import promotions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a registered model")
    parser.add_argument("version", metavar="VERSION", help="the number of the version")
    add_why(parser)
    parser.add_argument("--alias", metavar="ALIAS", help="set this alias instead of the champion's")


def add_why(parser: argparse.ArgumentParser) -> None:
    """Adds --why."""
    parser.add_argument("--why", metavar="TEXT", default="", help="the reason, shown by `finetune models NAME`")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the change. Raises UserError for an unknown model or version."""
    print(promotions.promote(arguments.name, arguments.version, arguments.why, arguments.alias))
    return COMPLETED
