"""Prefect events that this project emits, and the runs that deployments start on them.

| event | resource | emitted |
|---|---|---|
| finetune.data.updated | finetune.data.NAME | by `finetune data-updated NAME` |
| finetune.run.alive | prefect.flow-run.ID | by each run, twice a minute |
| finetune.verdict | finetune.model.NAME, with `finetune.decision` | by a run at its verdict or failure, with a server |
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tasks.prefect import servers
from tasks.prefect.deployments import require_server
from tasks.prefect.servers import ServicesFailed
from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.events import Event

DATA_UPDATED, ALIVE, VERDICT = "finetune.data.updated", "finetune.run.alive", "finetune.verdict"
RESOURCE, DECISION = "prefect.resource.id", "finetune.decision"
DATA, MODEL = "finetune.data.", "finetune.model."
STARTED_WAIT_S = 30.0
ALIVE_EVERY_S = 30.0
ENDED_WAIT_S = 2.0


@contextlib.contextmanager
def emit_heartbeats(run: str) -> Iterator[None]:
    """Emits heartbeats of this flow run during the block, from a thread: a run without them counts as dead.

    The starter of a run sets the interval of Prefect's own heartbeat, by default three minutes: too long for a run that
    is to be crashed within two.
    """
    from prefect.events import emit_event

    ended = threading.Event()

    def emit() -> None:
        while not ended.is_set():
            emit_event(ALIVE, {RESOURCE: f"prefect.flow-run.{run}"})
            ended.wait(ALIVE_EVERY_S)

    # In this context, which has the server's address.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(emit,), name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(ENDED_WAIT_S)  # a heartbeat after the run's end would look like a run that is running


def emit_verdict(model: str, payload: dict[str, Any]) -> None:
    """Emits the verdict of a run for this model; `payload["decision"]` is a label of the event too, for triggers to
    match. A thread of Prefect's sends it: a server that is down delays nothing."""
    from prefect.events import emit_event

    emit_event(VERDICT, {RESOURCE: MODEL + model, DECISION: payload["decision"]}, payload=payload)


def emit_data_updated(name: str) -> list[tuple[str, FlowRun]]:
    """Emits that the data of this name were updated, and waits until the server has started a run of each deployment
    with such a trigger. Returns the runs with the names of their deployments, such as `retrain/sst2`.

    Raises UserError, and emits nothing, without a server or such a deployment. Raises ServicesFailed if the server does
    not answer, or does not start the runs.
    """
    from prefect.client.orchestration import get_client
    from prefect.events import Event, Resource

    url = require_server()
    if not servers.is_healthy(url):
        raise ServicesFailed(f"the Prefect server does not answer at {url}: `finetune status` shows what runs.")
    event = Event(event=DATA_UPDATED, resource=Resource({RESOURCE: DATA + name}))
    with get_client(sync_client=True) as client:
        deployments = _find_deployments(client, event, name)
        asyncio.run(_send(event))
        return _wait_for_runs(client, event, deployments)


async def _send(event: Event) -> None:
    from prefect.events.clients import get_events_client

    # With a checkpoint at each event the client raises errors of sending, which it would only log otherwise.
    async with get_events_client(checkpoint_every=1) as client:
        await client.emit(event)


def _find_deployments(client: SyncPrefectClient, event: Event, name: str) -> set[uuid.UUID]:
    """The deployments that the event starts. Raises UserError if there is none."""
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


def _wait_for_runs(client: SyncPrefectClient, event: Event, deployments: set[uuid.UUID]) -> list[tuple[str, FlowRun]]:
    """The deployments' runs that the server has created since the event, by flow and deployment."""
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
            return [(_deployment_name(client, run), run) for run in made.values()]
        if time.monotonic() > deadline:
            message = f"the server has the event, but has not started all within {STARTED_WAIT_S:g} s"
            raise ServicesFailed(f"{message}: see {require_server().removesuffix('/api')}/events")
        time.sleep(0.2)


def _deployment_name(client: SyncPrefectClient, run: FlowRun) -> str:
    assert run.deployment_id is not None
    return f"{client.read_flow(run.flow_id).name}/{client.read_deployment(run.deployment_id).name}"
