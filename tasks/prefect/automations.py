"""Prefect automations of this project: one crashes the runs of dead workers, the others send notifications.

Automations are found by their names. A notification is sent through a block of the server, which holds its address and
secrets.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import BlockDocument, StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.settings import PREFECT_UI_URL

from tasks.prefect.deployments import FLOWS
from tasks.prefect.events import ALIVE, DECISION, MODEL, RESOURCE, VERDICT
from training.problems import UserError, nearest

DEAD = "finetune: crash runs without heartbeats"
DEAD_BEFORE = "finetune: crash runs that fell silent"
"""Its name in earlier versions of this project."""
SILENT_S = 95.0
"""Three heartbeats: one may be lost while the server restarts."""
AT_REST = (
    *("Completed", "Unchanged", "HubUnreachable", "Failed", "TimedOut", "Crashed", "Cancelled"),
    *("AwaitingRetry", "Scheduled", "Pending", "Paused", "Suspended"),
)
"""States in which a run sends no heartbeats. Final states of other names need no entry: the server crashes no run in a
final state."""
NAME = re.compile(r"finetune: (?P<kind>verdict|failure) to (?P<block>.+)")
PAGE = 200

VERDICT_SUBJECT = "{{ event.resource.id|replace('finetune.model.', '') }}: {{ event.payload.summary }}"
VERDICT_BODY = """{{ event.payload.reason }}
{% if event.payload.version %}Version: {{ event.payload.version }}
{% endif %}{% if event.payload.champion_before %}Champion before: {{ event.payload.champion_before }}
{% endif %}Run: UI_URL/runs/flow-run/{{ event.payload.flow_run_id }}"""
FAILURE_SUBJECT = "{{ flow_run.name }}: {{ flow_run.state.name|lower }}"
FAILURE_BODY = """{{ flow_run.state.message }}
Run: UI_URL/runs/flow-run/{{ flow_run.id }}
{%- if flow.name in ["finetune", "retrain"] and not flow_run.parent_task_run_id
    or flow.name in ["finetune", "retrain", "sweep", "batch-predict"] and flow_run.deployment_id %}
Continue it: finetune resume {{ flow_run.id }}{% endif %}"""


KINDS = {
    "verdict": (
        # The events of failed runs have another decision: the trigger for failures handles those runs.
        EventTrigger(
            expect={VERDICT},
            match={RESOURCE: f"{MODEL}*", DECISION: ["promote", "keep", "reject"]},
            for_each={RESOURCE},
        ),
        VERDICT_SUBJECT,
        VERDICT_BODY,
        "A model was promoted, kept as challenger or rejected.",
    ),
    "failure": (
        EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"},
            match_related={"prefect.resource.role": "flow", "prefect.resource.name": [*FLOWS.values()]},
            for_each={RESOURCE},
        ),
        FAILURE_SUBJECT,
        FAILURE_BODY,
        f"A run of {', '.join(FLOWS.values())} failed or crashed.",
    ),
}
"""The trigger, subject, body and description of each kind of notification."""


class Notification(NamedTuple):
    """An automation that sends notifications."""

    kind: str
    """verdict or failure."""
    block: str
    """Such as `slack-webhook/team`."""
    enabled: bool

    @property
    def name(self) -> str:
        """The name of the automation."""
        return f"finetune: {self.kind} to {self.block}"


def create_crash_automation(client: SyncPrefectClient) -> None:
    """Creates the automation that crashes runs without heartbeats. It stays disabled if a user has disabled it."""
    # Only runs of this project emit ALIVE, so no other run is affected. The states are listed one by one: a pattern
    # would match Prefect's own heartbeat, which must not count as a sign of life.
    silence = EventTrigger(
        after={ALIVE},
        expect={ALIVE, *(f"prefect.flow-run.{state}" for state in AT_REST)},
        for_each={RESOURCE},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENT_S),
    )
    message = (
        f"No heartbeat for {SILENT_S:g} s: its worker or its machine died. Continue it with `finetune resume`, or "
        "start it again by its command if that refuses it."
    )
    crash = ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=message, force=False)
    description = "Runs whose worker or machine died are crashed, so that they can be retried."
    crash_runs = AutomationCore(name=DEAD, description=description, trigger=silence, actions=[crash])
    _create_or_update(client, crash_runs, DEAD_BEFORE)


def notify(client: SyncPrefectClient, name: str, kinds: Collection[str]) -> None:
    """Creates the notifications of these kinds through the block, and deletes the block's others.

    Raises UserError for an unknown block.
    """
    block = _find_block(client, name)
    for kind in KINDS:
        notification = Notification(kind, name, enabled=True)
        if kind in kinds:
            _create_or_update(client, _build_automation(notification, block))
        else:
            for automation in client.read_automations_by_name(notification.name):
                client.delete_automation(automation.id)


def _create_or_update(client: SyncPrefectClient, automation: AutomationCore, *former_names: str) -> None:
    """Creates the automation, or updates an existing one of its name, which stays enabled or disabled."""
    names = (automation.name, *former_names)
    if existing := [found for name in names for found in client.read_automations_by_name(name)]:
        # The client sends only fields that are set explicitly; the server refuses the owner.
        fields = {**automation.model_dump(exclude={"owner_resource"}), "enabled": existing[0].enabled}
        client.update_automation(existing[0].id, type(automation).model_validate(fields))
    else:
        client.create_automation(automation)


def read_notifications(client: SyncPrefectClient) -> dict[UUID, Notification]:
    """Reads all notifications, by the automation's id."""
    return {
        automation.id: Notification(match["kind"], match["block"], automation.enabled)
        for automation in client.read_automations()
        if (match := NAME.fullmatch(automation.name))
    }


def remove(client: SyncPrefectClient, block: str | None, kinds: Collection[str]) -> list[Notification]:
    """Deletes the notifications of these kinds through this block, by default through all, and returns them. Raises
    UserError for a block without notifications."""
    existing = read_notifications(client)
    removed = {
        id: notification
        for id, notification in existing.items()
        if block in (None, notification.block) and notification.kind in kinds
    }
    if not removed and block is not None:
        blocks = sorted({notification.block for notification in existing.values()})
        message = f"no notification is sent through {block!r}; blocks in use: {', '.join(blocks) or 'none'}."
        raise UserError.of("option", "BLOCK", message + nearest(block, blocks))
    for id in removed:
        client.delete_automation(id)
    return [*removed.values()]


def _build_automation(notification: Notification, block: BlockDocument) -> AutomationCore:
    trigger, subject, body, description = KINDS[notification.kind]
    # The UI's address in this process's settings: Prefect's own filter for links returns None if the server has none.
    body = body.replace("UI_URL", str(PREFECT_UI_URL.value()))
    send = SendNotification(block_document_id=block.id, subject=subject, body=body)
    return AutomationCore(name=notification.name, description=description, trigger=trigger, actions=[send])


def _find_block(client: SyncPrefectClient, name: str) -> BlockDocument:
    blocks: dict[str, BlockDocument] = {}
    while page := client.read_block_documents(offset=len(blocks), limit=PAGE, include_secrets=False):
        blocks |= {f"{block.block_type.slug}/{block.name}": block for block in page if block.block_type and block.name}
        if len(page) < PAGE:
            break
    senders = {
        key: block
        for key, block in blocks.items()
        if block.block_schema and "notify" in block.block_schema.capabilities
    }
    if name in senders:
        return senders[name]
    choice = f"choose from {', '.join(sorted(senders))}, or create one" if senders else "create one"
    fault = "is not a block that sends notifications" if name in blocks else "is not a block of the server"
    message = f"{name!r} {fault}: {choice} in the UI under Blocks, or begin with `prefect block create slack-webhook`."
    raise UserError.of("option", "BLOCK", message + nearest(name, senders))
