"""Report new data to the Prefect server, which starts the deployments that retrain on these data."""

from __future__ import annotations

import argparse

from flows.cli.shared import COMPLETED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the name behind `finetune.data.` in the deployment's trigger")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the runs that start. Raises UserError without a server or a deployment, ServicesFailed if either fails."""
    from tasks.prefect import events

    for deployment, run in events.emit_data_updated(arguments.name):
        print(f"{deployment}: {run.name} ({run.id}) is {run.state_name}")
    return COMPLETED
