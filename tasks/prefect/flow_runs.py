"""Flow runs as the Prefect server knows them: found by what a person calls them, and tried again."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Any

from tasks.cache import settings
from tasks.cache.locks import held
from tasks.prefect.deployments import FLOWS
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.filters import FlowRunFilter
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
    if run.state is not None and run.state.is_completed():
        raise _mistake(f"{run.id} is {_state(run)}: a new run is `finetune run`.")
    if goes_on_here(str(run.id)):
        raise _mistake(f"{run.id} goes on here, though the server has it as {_state(run)}: wait until it ends.")
    if not _unfinished(run):
        raise _mistake(f"{run.id} is {_state(run)}, here or elsewhere: end it by `prefect flow-run cancel {run.id}`.")
    return run


def schedule(run: FlowRun) -> FlowRun:
    """Has the server take the run for one to be tried again: by a worker, where it is a deployment's."""
    from prefect.client.orchestration import get_client
    from prefect.states import AwaitingRetry

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, AwaitingRetry(message="finetune resume"), force=True)
        return client.read_flow_run(run.id)


def tell_killed() -> None:
    """Tells the server of the runs of this home that it takes for running, and that nobody goes on with: Crashed, or
    Cancelled where somebody asked for that. A server that died with them, or before, cannot know."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import State, StateType

    going = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING])
    with get_client(sync_client=True) as client:
        for run in _recent(client, FlowRunFilter(state=FlowRunFilterState(type=going))):
            if run.state is not None and was_killed_here(str(run.id)):
                kind = StateType.CANCELLED if run.state.is_cancelling() else StateType.CRASHED
                message = "It was killed with its worker. `finetune resume` goes on with it."
                with contextlib.suppress(Exception):  # the others shall be told of all the same
                    client.set_flow_run_state(run.id, State(type=kind, message=message), force=True)


def flow_name(run: FlowRun) -> str:
    """The name of the flow that it is a run of."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_flow(run.flow_id).name


def _recent(client: SyncPrefectClient, those: FlowRunFilter | None = None) -> list[FlowRun]:
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[*FLOWS.values()])),
        flow_run_filter=those,
        sort=FlowRunSort.START_TIME_DESC,
        limit=RECENT,
    )


def _called(client: SyncPrefectClient, called: str) -> list[FlowRun]:
    from prefect.exceptions import ObjectNotFound

    try:
        run = client.read_flow_run(uuid.UUID(called))
        return [run] if client.read_flow(run.flow_id).name in FLOWS.values() else []
    except ValueError:
        return [run for run in _recent(client) if called == run.name or str(run.id).startswith(called)]
    except ObjectNotFound:
        return []


def _unfinished(run: FlowRun) -> bool:
    """Whether it ended without completing; or was killed here, so that it is Running for ever."""
    if run.state is not None and run.state.is_final():
        return not run.state.is_completed() and not goes_on_here(str(run.id))
    return run.deployment_id is None and was_killed_here(str(run.id))


def goes_on_here(run: str) -> bool:
    """Whether a process of this home is at the flow run, whatever the server takes it for."""
    return held(settings.home() / "runs" / run / "lock")


def was_killed_here(run: str) -> bool:
    """Whether a flow run that nobody has told the end of began in this home, where no process goes on with it."""
    return (settings.home() / "runs" / run).is_dir() and not goes_on_here(run)


def _state(run: Any) -> str:
    return run.state.name if run.state else "without a state"


def _mistake(message: str) -> UserError:
    return UserError([Problem(kind="option", where="RUN", message=message)])
