"""The commands for deployment files and the Prefect server: `schema`, `deploy`, `data-updated`, `notify`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flows.cli.shared import COMPLETED, output_file, write_json
from flows.reports.tables import align
from tasks import servers
from tasks.prefect import deployments
from tasks.prefect.deployments import deployment_schema, require_server
from tasks.servers import ServicesFailed
from training.problems import UserError

FOLDER = Path("deployments")
KINDS = ("verdict", "failure")


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=output_file, help="write the schema to this file instead")


def schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of deployment files.

    An editor completes and checks recipes if the first line of a deployment file names the schema:
    # yaml-language-server: $schema=finetune.json
    """
    schema = deployment_schema()
    if arguments.out is None:
        print(json.dumps(schema, indent=2, ensure_ascii=False))
    write_json(arguments.out, schema)
    return COMPLETED


def add_deploy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", type=Path, nargs="*", help=f"deployment files (default: {FOLDER}/*.yaml)"
    )


def deploy(arguments: argparse.Namespace) -> int:
    """Register the flows of deployment files with the Prefect server.

    All files are checked before the first is deployed.
    """
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
                if entry.paused:
                    print(
                        f"{file}: schedules paused in this file (active: false): {', '.join(entry.paused)}", flush=True
                    )
    print(f"Deployed to {url}")
    return COMPLETED


def add_data_updated_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the name behind `finetune.data.` in the deployment's trigger")


def data_updated(arguments: argparse.Namespace) -> int:
    """Report new data to the Prefect server, which starts the deployments that retrain on these data."""
    from tasks.prefect import events

    for deployment, run in events.emit_data_updated(arguments.name):
        print(f"{deployment}: {run.name} ({run.id}) is {run.state_name}")
    return COMPLETED


def add_notify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "block", metavar="BLOCK", nargs="?", help="type and name of a notification block, such as slack-webhook/team"
    )
    parser.add_argument("--on", choices=KINDS, help="send only these events (default: both)")
    parser.add_argument("--remove", action="store_true", help="stop the notifications of BLOCK, or of all blocks")


def notify(arguments: argparse.Namespace) -> int:
    """Send verdicts and failures to people through a notification block of the Prefect server.

    Without BLOCK, lists the notifications. Either way, the server marks runs whose worker died as crashed from now on.
    """
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
