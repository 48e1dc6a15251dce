"""`finetune schema`: prints the JSON Schema of a deployment file, with which an editor completes recipes.

Write it to a file, and name that in the first line of a deployment file:
# yaml-language-server: $schema=finetune.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from flows.cli.arguments import unwritable
from flows.cli.codes import COMPLETED
from tasks.prefect.deployment_schema import deployment_schema
from training.problems import Problem, UserError


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser
    parser = commands.add_parser("schema", help="print the JSON Schema of deployment files", description=__doc__)
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the schema to this file instead")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints the schema or writes it."""
    out: Path | None = arguments.out
    if out is not None and (message := unwritable(out)):
        raise UserError([Problem(kind="option", where="--out", message=message)])
    text = json.dumps(deployment_schema(), indent=2, ensure_ascii=False)
    if out is None:
        print(text)
    else:
        out.write_text(f"{text}\n", encoding="utf-8")
    return COMPLETED
