"""Events that the Prefect server is told, and the runs that deployments start because of them."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING

from tasks.runtime import services
from tasks.runtime.deploying import need_server
from tasks.runtime.services import ServicesFailed
from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.events import Event

DATA_UPDATED = "finetune.data.updated"
RESOURCE = "prefect.resource.id"
DATA = "finetune.data."
STARTED_WAIT_S = 30.0


def data_updated(name: str) -> list[tuple[str, FlowRun]]:
    """Tells the server that the data of this name were updated, and waits until that has started a run of each
    deployment that it starts: `retrain/sst2`, with the run.

    Raises UserError, and tells the server nothing, without a server or without such a deployment; ServicesFailed where
    the server does not answer, or does not start them.
    """
    from prefect.client.orchestration import get_client
    from prefect.events import Event, Resource

    url = need_server()
    if not services.answers(url):
        raise ServicesFailed(f"the Prefect server does not answer at {url}: `finetune status` says what runs.")
    event = Event(event=DATA_UPDATED, resource=Resource({RESOURCE: DATA + name}))
    with get_client(sync_client=True) as client:
        started = _started_by(client, event, name)
        asyncio.run(_send(event))
        return _runs(client, event, started)


async def _send(event: Event) -> None:
    from prefect.events.clients import get_events_client

    # The client waits for the server to confirm each event: what it could not send, it would only log else.
    async with get_events_client(checkpoint_every=1) as client:
        await client.emit(event)


def _started_by(client: SyncPrefectClient, event: Event, name: str) -> set[uuid.UUID]:
    """The deployments that the event starts. Raises UserError without one."""
    from prefect.events.actions import RunDeployment
    from prefect.events.schemas.automations import EventTrigger
    from prefect.events.schemas.events import ResourceSpecification

    found, known = set(), set()
    for automation in client.read_automations():
        trigger = automation.trigger
        if not automation.enabled or not isinstance(trigger, EventTrigger) or DATA_UPDATED not in trigger.expect:
            continue
        ids = {one.deployment_id for one in automation.actions if isinstance(one, RunDeployment) and one.deployment_id}
        match = ResourceSpecification.model_validate(trigger.match)
        known |= {value.removeprefix(DATA) for _, values in match.items() for value in values}
        found |= ids if match.matches(event.resource) else set()
    if not found:
        message = f"no deployment is started by {DATA_UPDATED} of {name!r}"
        message += f", only of {', '.join(sorted(known))}." if known else ": `finetune deploy`, with a trigger for it."
        raise UserError([Problem(kind="option", where="NAME", message=message + nearest(name, known))])
    return found


def _runs(client: SyncPrefectClient, event: Event, deployments: set[uuid.UUID]) -> list[tuple[str, FlowRun]]:
    """The deployments' runs that the server has made since the event, by flow and deployment."""
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterId,
        FlowRunFilter,
        FlowRunFilterExpectedStartTime,
    )

    since = FlowRunFilter(expected_start_time=FlowRunFilterExpectedStartTime(after_=event.occurred))
    those = DeploymentFilter(id=DeploymentFilterId(any_=sorted(deployments)))
    deadline = time.monotonic() + STARTED_WAIT_S
    while True:
        listed = client.read_flow_runs(flow_run_filter=since, deployment_filter=those)
        made = {run.deployment_id: run for run in listed if run.created_by and run.created_by.type == "AUTOMATION"}
        if made.keys() == deployments:
            return [(_called(client, run), run) for run in made.values()]
        if time.monotonic() > deadline:
            message = f"the server has the event, but has not started all within {STARTED_WAIT_S:g} s"
            raise ServicesFailed(f"{message}: see {need_server().removesuffix('/api')}/events")
        time.sleep(0.2)


def _called(client: SyncPrefectClient, run: FlowRun) -> str:
    assert run.deployment_id is not None
    return f"{client.read_flow(run.flow_id).name}/{client.read_deployment(run.deployment_id).name}"
