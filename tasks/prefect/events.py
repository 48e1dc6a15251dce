"""Prefect events of this project, and the deployment runs that they start.

| event | resource | emitted |
|---|---|---|
| finetune.data.updated | finetune.data.NAME | by `finetune data-updated NAME` |
| finetune.run.alive | prefect.flow-run.ID | by each run, twice a minute |
| finetune.verdict | finetune.model.NAME, with `finetune.decision` | by a run at its verdict or failure, with a server |
| finetune.drift | finetune.model.NAME, with `finetune.drift` | by each drift report on a version of this model |
| finetune.evaluated | finetune.model.NAME | by an evaluation with a figure outside of the gate's bounds |
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.objects import FlowRun
from prefect.events import Event, Resource, emit_event
from prefect.events.actions import RunDeployment
from prefect.events.clients import get_events_client
from prefect.events.schemas.automations import EventTrigger
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import Abort

from tasks import servers
from tasks.prefect import flow_runs
from tasks.prefect.deployments import require_server
from tasks.servers import ServicesFailed
from training.problems import UserError, nearest

DATA_UPDATED, ALIVE, VERDICT = "finetune.data.updated", "finetune.run.alive", "finetune.verdict"
DRIFT, EVALUATED = "finetune.drift", "finetune.evaluated"
RESOURCE, DECISION = "prefect.resource.id", "finetune.decision"
DATA, MODEL = "finetune.data.", "finetune.model."
STARTED_WAIT_S = 30.0
ALIVE_EVERY_S = 30.0
ENDED_WAIT_S = 2.0


@contextlib.contextmanager
def emit_heartbeats(run: str) -> Iterator[None]:
    """Emits heartbeats of this flow run from a thread during the block. A run without heartbeats counts as dead. A run
    that `finetune down` stops is Cancelled, instead of Crashed as by other signals.

    Prefect's own heartbeat is too slow to crash a dead run within two minutes: by default it comes every three minutes,
    and the program that starts the run sets its interval.
    """
    ended = threading.Event()

    def emit() -> None:
        while not ended.is_set():
            emit_event(ALIVE, {RESOURCE: f"prefect.flow-run.{run}"})
            ended.wait(ALIVE_EVERY_S)

    # The thread gets a copy of this context, which has the server's address.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(emit,), name="alive", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not flow_runs.cancel_stopped(run):
            raise
        raise Abort("stopped by finetune down") from error  # Prefect reports no other state
    finally:
        ended.set()
        thread.join(ENDED_WAIT_S)  # after a heartbeat that follows the run's end, the run would seem to be running


@contextlib.contextmanager
def without_prefect_heartbeats() -> Iterator[None]:
    """Flows that are called in the block send no heartbeats of Prefect's own: its thread, which looks once a second
    whether the flow has ended, delays the end. Those of `emit_heartbeats` remain."""
    with flow_runs.settings_with("flows", heartbeat_frequency=None):
        yield


def emit_verdict(model: str, payload: dict[str, Any]) -> None:
    """Emits the verdict of a run for this model. `payload["decision"]` is also a label of the event, which triggers can
    match. A thread of Prefect sends the event, so a server that is down causes no delay."""
    emit_event(VERDICT, {RESOURCE: MODEL + model, DECISION: payload["decision"]}, payload=payload)


def emit_drift(model: str, payload: dict[str, Any]) -> None:
    """Emits the verdict of a drift report on a version of this registered model, as `emit_verdict` does. The
    verdict is also the event's label `finetune.drift`."""
    emit_event(DRIFT, {RESOURCE: MODEL + model, DRIFT: payload["verdict"]}, payload=payload)


def emit_evaluated(model: str, payload: dict[str, Any]) -> None:
    """Emits that a version of this registered model is outside of the gate's bounds on new rows, as `emit_verdict`
    does."""
    emit_event(EVALUATED, {RESOURCE: MODEL + model}, payload=payload)


def emit_data_updated(name: str) -> list[tuple[str, FlowRun]]:
    """Emits the event that the data of this name were updated, and waits until the server has started a run of each
    deployment that this event triggers. Returns the runs with the names of their deployments, such as `retrain/sst2`.

    Raises UserError, and emits nothing, without a server or such a deployment. Raises ServicesFailed if the server does
    not answer, or does not start the runs.
    """
    url = require_server()
    if not servers.is_healthy(url):
        raise ServicesFailed(f"the Prefect server does not answer at {url}: `finetune status` shows what runs.")
    event = Event(event=DATA_UPDATED, resource=Resource({RESOURCE: DATA + name}))
    with get_client(sync_client=True) as client:
        deployments = _find_deployments(client, event, name)
        asyncio.run(_send(event))
        return _wait_for_runs(client, event, deployments)


async def _send(event: Event) -> None:
    # With a checkpoint at each event, the client raises errors that it otherwise only logs.
    async with get_events_client(checkpoint_every=1) as client:
        await client.emit(event)


def _find_deployments(client: SyncPrefectClient, event: Event, name: str) -> set[uuid.UUID]:
    """Finds the deployments that the event starts. Raises UserError if there is none."""
    deployments, names = set(), set()
    for automation in client.read_automations():
        trigger = automation.trigger
        if not automation.enabled or not isinstance(trigger, EventTrigger) or DATA_UPDATED not in trigger.expect:
            continue
        match = ResourceSpecification.model_validate(trigger.match)
        names |= {value.removeprefix(DATA) for _, values in match.items() for value in values}
        if match.matches(event.resource):
            actions = [action for action in automation.actions if isinstance(action, RunDeployment)]
            deployments |= {action.deployment_id for action in actions if action.deployment_id}
    if not deployments:
        message = f"no deployment is started by {DATA_UPDATED} of {name!r}"
        message += f", only of {', '.join(sorted(names))}." if names else ": `finetune deploy`, with a trigger for it."
        raise UserError.of("option", "NAME", message + nearest(name, names))
    return deployments


def _wait_for_runs(client: SyncPrefectClient, event: Event, deployments: set[uuid.UUID]) -> list[tuple[str, FlowRun]]:
    """Waits until the server has started a run of each deployment after the event, and returns them by name."""
    since = FlowRunFilter(expected_start_time=FlowRunFilterExpectedStartTime(after_=event.occurred))
    of_deployments = DeploymentFilter(id=DeploymentFilterId(any_=sorted(deployments)))
    deadline = time.monotonic() + STARTED_WAIT_S
    while True:
        runs = client.read_flow_runs(flow_run_filter=since, deployment_filter=of_deployments)
        started = {run.deployment_id: run for run in runs if run.created_by and run.created_by.type == "AUTOMATION"}
        if started.keys() == deployments:
            return [(_deployment_name(client, run), run) for run in started.values()]
        if time.monotonic() > deadline:
            message = f"the server has the event, but has not started all runs within {STARTED_WAIT_S:g} s"
            raise ServicesFailed(f"{message}: see {require_server().removesuffix('/api')}/events")
        time.sleep(0.2)


def _deployment_name(client: SyncPrefectClient, run: FlowRun) -> str:
    assert run.deployment_id is not None
    return f"{client.read_flow(run.flow_id).name}/{client.read_deployment(run.deployment_id).name}"
