"""`finetune deploy [FILE ...]`: checks deployment files, all of them first, and gives them to the Prefect server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flows.cli.codes import COMPLETED
from tasks.prefect import deployments
from training.problems import Problem, UserError

FOLDER = Path("deployments")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser
    parser = commands.add_parser("deploy", help="give deployment files to the server", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path, nargs="*", help=f"default: {FOLDER}/*.yaml")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Deploys each file. Raises UserError with the mistakes of all, before any is deployed."""
    files = arguments.file or sorted(FOLDER.glob("*.yaml"))
    if not files:
        message = f"there is none in {FOLDER}/ here: name one, or go to the folder that holds {FOLDER}/."
        raise UserError([Problem(kind="option", where="FILE", message=message)])
    found = deployments.checked(files)
    url = deployments.need_server()
    deployments.need_pools(one.pool for one in found)
    for file in files:
        deployments.deploy(file)
        for one in found:
            if one.file == file:
                print(f"{file}: prefect deployment run {one.flow}/{one.name} --watch", flush=True)
    print(f"Deployed to {url}")
    return COMPLETED
