"""`finetune down`: stops what `finetune up` started over this home; runs save a checkpoint first."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli.codes import COMPLETED
from tasks.services import lifecycle


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser("down", help="stop what up started", description=__doc__)
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Stops them, or says that nothing runs. Raises ServicesFailed where they do not end."""
    print("Stopped." if lifecycle.down() else "Nothing of `finetune up` runs over this home.")
    return COMPLETED
