"""Print the JSON Schema of deployment files.

An editor completes and checks recipes if the first line of a deployment file names the schema:
# yaml-language-server: $schema=finetune.json
"""

from __future__ import annotations

import argparse
import json

from flows.cli.shared import COMPLETED, output_file, write_json
from tasks.prefect.deployments import deployment_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=output_file, help="write the schema to this file instead")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the schema or writes it."""
    schema = deployment_schema()
    if arguments.out is None:
        print(json.dumps(schema, indent=2, ensure_ascii=False))
    write_json(arguments.out, schema)
    return COMPLETED
