"""Stop the servers and the worker of `finetune up`. Runs save a checkpoint first."""

from __future__ import annotations

import argparse

from flows.cli.shared import COMPLETED
from tasks.services import lifecycle


def execute(arguments: argparse.Namespace) -> int:
    """Stops them. Raises ServicesFailed if they do not end."""
    print("Stopped." if lifecycle.down() else "Nothing of `finetune up` runs over this home.")
    return COMPLETED
