"""Register the flows of deployment files with the Prefect server.

All files are checked before the first is deployed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flows.cli.shared import COMPLETED
from tasks.prefect import deployments
from training.problems import UserError

FOLDER = Path("deployments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", type=Path, nargs="*", help=f"deployment files (default: {FOLDER}/*.yaml)"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Deploys each file and prints the command that starts it. Raises UserError with the mistakes of all files."""
    files = arguments.file or sorted(FOLDER.glob("*.yaml"))
    if not files:
        raise UserError.of(
            "option", "FILE", f"{FOLDER}/ has no deployment file: name one, or go to the folder of {FOLDER}/."
        )
    entries = deployments.read_deployments(files)
    url = deployments.require_server()
    deployments.ensure_pools(entry.pool for entry in entries)
    for file in files:
        deployments.deploy(file)
        for entry in entries:
            if entry.file == file:
                print(f"{file}: prefect deployment run {entry.flow}/{entry.name} --watch", flush=True)
    print(f"Deployed to {url}")
    return COMPLETED
