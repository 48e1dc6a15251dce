"""Make the previous champion the champion again.

A second rollback goes back one more.
"""

from __future__ import annotations

import argparse

from flows.cli.promote import add_why
from flows.cli.shared import COMPLETED
from tasks.registry import promotions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a registered model")
    add_why(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Prints the change. Raises UserError without a previous champion."""
    print(promotions.roll_back(arguments.name, arguments.why))
    return COMPLETED
