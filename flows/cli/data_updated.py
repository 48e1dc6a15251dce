"""`finetune data-updated NAME`: tells the Prefect server that data were updated, which starts what retrains on them."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli.codes import COMPLETED
from tasks.prefect import events


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser
    parser = commands.add_parser("data-updated", help="start what retrains on these data", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="as a deployment's trigger has it behind finetune.data.")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints what it started. Raises UserError without a server or a deployment, ServicesFailed where one fails."""
    for deployment, run in events.data_updated(arguments.name):
        print(f"{deployment}: {run.name} ({run.id}) is {run.state_name}")
    return COMPLETED
