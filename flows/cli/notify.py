"""Send verdicts and failures to people through a notification block of the Prefect server.

Without BLOCK, lists the notifications. Either way, the server marks runs whose worker died as crashed from now on.
"""

from __future__ import annotations

import argparse

from flows.cli.shared import COMPLETED
from flows.reports.tables import align
from tasks.prefect import servers
from tasks.prefect.deployments import require_server
from tasks.prefect.servers import ServicesFailed

KINDS = ("verdict", "failure")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "block", metavar="BLOCK", nargs="?", help="type and name of a notification block, such as slack-webhook/team"
    )
    parser.add_argument("--on", choices=KINDS, help="send only these events (default: both)")
    parser.add_argument("--remove", action="store_true", help="stop the notifications of BLOCK, or of all blocks")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the notifications of each block. Raises UserError without a server or for an unknown block."""
    url = require_server()
    if not servers.is_healthy(url):
        raise ServicesFailed(f"the Prefect server at {url} does not answer: see `finetune status`.")
    from prefect.client.orchestration import get_client

    from tasks.prefect import automations

    kinds = [arguments.on] if arguments.on else KINDS
    with get_client(sync_client=True) as client:
        if arguments.remove:
            removed = automations.remove(client, arguments.block, kinds)
            lines = [f"removed: {notification.kind} to {notification.block}" for notification in removed]
            print(*(lines or ["There was no notification."]), sep="\n")
            return COMPLETED
        automations.create_crash_automation(client)
        if arguments.block is not None:
            automations.notify(client, arguments.block, kinds)
        found = sorted(automations.read_notifications(client).values())
    rows = [
        [notification.kind, notification.block, "" if notification.enabled else "disabled"] for notification in found
    ]
    print(*(align(rows) if rows else ["There are no notifications: name a block."]), sep="\n")
    return COMPLETED
