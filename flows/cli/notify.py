"""`finetune notify [BLOCK]`: has the Prefect server tell of verdicts and failures through a notification block, such as
slack-webhook/team; without BLOCK, lists the notifications. Runs of workers that died are crashed from then on, too."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli.codes import COMPLETED
from flows.reports.tables import aligned
from tasks.prefect import automations, servers
from tasks.prefect.deployments import need_server
from tasks.prefect.servers import ServicesFailed


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser
    parser = commands.add_parser("notify", help="send verdicts and failures to people", description=__doc__)
    parser.add_argument("block", metavar="BLOCK", nargs="?", help="type/name of a notification block of the server's")
    kinds = list(automations.KINDS)
    parser.add_argument("--on", choices=kinds, help="the one that is told, or ended (default: both)")
    parser.add_argument("--remove", action="store_true", help="end what goes through BLOCK, or all of it")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints the notifications of each block. Raises UserError without a server, and for an unknown block."""
    url = need_server()
    if not servers.answers(url):
        raise ServicesFailed(f"the Prefect server does not answer at {url}: `finetune status` says what runs.")
    from prefect.client.orchestration import get_client

    kinds = [arguments.on] if arguments.on else list(automations.KINDS)
    with get_client(sync_client=True) as client:
        if arguments.remove:
            gone = automations.remove(client, arguments.block, kinds)
            print(*([f"no more: {one.kind} to {one.block}" for one in gone] or ["Nothing was sent."]), sep="\n")
            return COMPLETED
        automations.crash_silent_runs(client)
        if arguments.block is not None:
            automations.notify(client, arguments.block, kinds)
        found = automations.notifications(client)
    rows = [[one.kind, one.block, "" if one.enabled else "disabled"] for one in sorted(found.values())]
    print(*(aligned(rows) if rows else ["Nothing is sent to anybody: name a block."]), sep="\n")
    return COMPLETED
