"""Flow runs as the Prefect server knows them: found by what a person calls them, and tried again."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from tasks.runtime.deploying import FLOWS
from tasks.runtime.outbox import Outbox
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

RECENT = 200
"""Flow runs that are looked through for the beginning of an id, or a name."""


def find(called: str | None) -> FlowRun:
    """The flow run of this id, beginning of an id, or name; without one, the last that did not complete.

    Raises UserError where there is none, several, or one that completed or still runs.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = _recent(client) if called is None else _called(client, called)
    if called is None:
        found = [run for run in found if _unfinished(run)][:1]
    if not found:
        what = "no run that did not complete" if called is None else f"no flow run {called!r}"
        raise _mistake(f"the server knows {what}; `prefect flow-run ls` lists them.")
    if len(found) > 1:
        several = ", ".join(f"{run.id} ({_state(run)})" for run in found[:5])
        raise _mistake(f"{called!r} may be any of {several}: name one by its id.")
    (run,) = found
    if not _unfinished(run):
        raise _mistake(f"{run.id} is {_state(run)}: a new run is `finetune run`.")
    if runs_here(str(run.id)):
        raise _mistake(f"{run.id} still runs on this machine.")
    return run


def runs_here(run: str) -> bool:
    """Whether a process of this home runs the flow run, or tells MLflow of it."""
    with Outbox(run).claimed() as mine:
        return not mine


def schedule(run: FlowRun) -> FlowRun:
    """Has the server take the run for one to be tried again: by a worker, where it is a deployment's."""
    from prefect.client.orchestration import get_client
    from prefect.states import AwaitingRetry

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, AwaitingRetry(message="finetune resume"), force=True)
        return client.read_flow_run(run.id)


def flow_name(run: FlowRun) -> str:
    """The name of the flow that it is a run of."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_flow(run.flow_id).name


def _recent(client: SyncPrefectClient) -> list[FlowRun]:
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[*FLOWS.values()])),
        sort=FlowRunSort.START_TIME_DESC,
        limit=RECENT,
    )


def _called(client: SyncPrefectClient, called: str) -> list[FlowRun]:
    from prefect.exceptions import ObjectNotFound

    try:
        return [client.read_flow_run(uuid.UUID(called))]
    except ValueError:
        return [run for run in _recent(client) if called == run.name or str(run.id).startswith(called)]
    except ObjectNotFound:
        return []


def _unfinished(run: FlowRun) -> bool:
    """Whether there is something left of it to do. One whose process was killed is Running for ever."""
    return run.state is None or not (run.state.is_completed() or run.state.is_scheduled())


def _state(run: Any) -> str:
    return run.state.name if run.state else "without a state"


def _mistake(message: str) -> UserError:
    return UserError([Problem(kind="option", where="RUN", message=message)])
