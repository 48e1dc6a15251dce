"""Flow runs at the Prefect server: look-up by id or name, scheduling of a retry, and reports of killed runs."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_ENABLED, PREFECT_UI_URL
from prefect.states import AwaitingRetry

from tasks.home import home
from tasks.prefect.deployments import FLOWS, MODEL_FLOWS
from tasks.servers import read_running
from tasks.tracking.outbox import PENDING_STATE, Outbox, is_running_here, was_killed_here
from training.jobs.protocol import write_atomically
from training.problems import UserError
from training.recipe import SWEEP_ENTRYPOINT

RESUMABLE = [name for entrypoint, name in FLOWS.items() if entrypoint not in MODEL_FLOWS]
"""Names of the flows whose runs can be resumed. Those that look at a registered model are started again."""
REPORTED = [*FLOWS.values(), "labels", "trial"]
"""Names of the flows whose killed runs are reported. A trial is continued by its sweep."""
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""The variable that a worker sets for its runs."""
RECENT = 200
"""Number of flow runs that are searched for a name or the beginning of an id."""


def find(name: str | None) -> FlowRun:
    """Finds the flow run with this id, beginning of an id, or name; by default the last that did not complete.

    Raises UserError if there is none, if there are several, or if it completed or still runs.
    """
    with get_client(sync_client=True) as client:
        recent = runs = _read_recent(client) if name is None else _find_by_name(client, name)
    if name is None:
        runs = [run for run in runs if _is_unfinished(run) and not _is_command(run)][:1]
    if not runs:
        missing = "no run that did not complete" if name is None else f"no flow run {name!r}"
        going_on = [f"{run.id} is {_state_name(run)}" for run in recent if _goes_on(run)][:3]
        hint = f"; {', '.join(going_on)}" if going_on else "; `prefect flow-run ls` lists them"
        raise UserError.of("option", "RUN", f"the server has {missing}{hint}.")
    if len(runs) > 1:
        several = ", ".join(f"{run.id} ({_state_name(run)})" for run in runs[:5])
        raise UserError.of("option", "RUN", f"{name!r} may be any of {several}: name one by its id.")
    (run,) = runs
    if run.state is not None and run.state.is_completed():
        raise UserError.of("option", "RUN", f"{run.id} is {_state_name(run)}: a new run is `finetune run`.")
    if _is_command(run):
        raise UserError.of(
            "option", "RUN", f"{run.id} is a batch prediction: the same `finetune predict` continues it."
        )
    if is_running_here(str(run.id)):
        raise UserError.of(
            "option",
            "RUN",
            f"{run.id} still runs here, although its state at the server is {_state_name(run)}: wait until it ends.",
        )
    if not _is_unfinished(run):
        raise UserError.of(
            "option",
            "RUN",
            f"{run.id} is {_state_name(run)}, here or elsewhere: end it by `prefect flow-run cancel {run.id}`.",
        )
    return run


def _goes_on(run: FlowRun) -> bool:
    """Whether the run is under way, or waits to be: not at its next scheduled time."""
    if run.state is None or run.state.is_final():
        return False
    return not (run.auto_scheduled and run.state.is_scheduled())


def schedule(run: FlowRun) -> FlowRun:
    """Sets the run's state to AwaitingRetry, and returns the run. A worker starts the run of a deployment again."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, AwaitingRetry(message="finetune resume"), force=True)
        return client.read_flow_run(run.id)


def report_killed(silent_s: float = 0.0) -> None:
    """Sets the state of runs that were killed in this home, perhaps with their server, and are still Running there:
    Crashed, or Cancelled for a run that was being cancelled. Only those that wrote nothing for `silent_s`: a run that
    has ended here may not have reported its state yet."""
    unfinished = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING])
    with get_client(sync_client=True) as client:
        for run in _read_recent(client, FlowRunFilter(state=FlowRunFilterState(type=unfinished)), REPORTED):
            if run.state is not None and was_killed_here(str(run.id), silent_s):
                final = StateType.CANCELLED if run.state.is_cancelling() else StateType.CRASHED
                message = "It was killed, perhaps with its worker or its machine."
                with contextlib.suppress(Exception):  # after an error, the next runs are still reported
                    if can_resume(run, client.read_flow(run.flow_id).name):
                        message += " Continue it with `finetune resume`."
                    client.set_flow_run_state(run.id, State(type=final, message=message), force=True)


def cancel_stopped(run: str) -> bool:
    """Cancels this process's flow run if `finetune down` has stopped it: otherwise Prefect would report a crash.
    Returns False if the process manager is not stopping, or if the server is away."""
    manager = read_running() if FLOW_RUN in os.environ else None  # a command's flow is not stopped with the services
    if manager is None or not manager.here or not manager.stopping:
        return False
    message = "Stopped by `finetune down`, or by the end of `finetune up`."
    message += f" Continue it with `finetune resume {run}`." if flow_run.get_flow_name() in RESUMABLE else ""
    with contextlib.suppress(Exception), get_client(sync_client=True) as client:
        client.set_flow_run_state(uuid.UUID(run), State(type=StateType.CANCELLED, message=message), force=True)
        return True
    return False


def flow_name(run: FlowRun) -> str:
    """The name of the run's flow."""
    with get_client(sync_client=True) as client:
        return client.read_flow(run.flow_id).name


def _read_recent(
    client: SyncPrefectClient, run_filter: FlowRunFilter | None = None, flows: Sequence[str] = RESUMABLE
) -> list[FlowRun]:
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[*flows])),
        flow_run_filter=run_filter,
        sort=FlowRunSort.START_TIME_DESC,
        limit=RECENT,
    )


def _find_by_name(client: SyncPrefectClient, name: str) -> list[FlowRun]:
    try:
        run = client.read_flow_run(uuid.UUID(name))
        return [run] if client.read_flow(run.flow_id).name in RESUMABLE else []
    except ValueError:
        return [run for run in _read_recent(client) if name == run.name or str(run.id).startswith(name)]
    except ObjectNotFound:
        return []


def _is_unfinished(run: FlowRun) -> bool:
    """Whether the run ended without completing, or was killed here and is still Running at the server."""
    if run.state is not None and run.state.is_final():
        return not run.state.is_completed() and not is_running_here(str(run.id))
    return run.deployment_id is None and was_killed_here(str(run.id))


def _is_command(run: FlowRun) -> bool:
    """Whether the run looks at a registered model and has no deployment: the same command starts it again."""
    return run.deployment_id is None and bool({"prediction", "model"} & run.parameters.keys())


def can_resume(run: FlowRun, flow: str) -> bool:
    """Whether `finetune resume` continues the run, which is of this flow: any of a deployment, and a training that a
    command started. A sweep and its parts are continued by the same command."""
    if flow not in RESUMABLE or run.deployment_id is not None:
        return flow in RESUMABLE
    return not _is_command(run) and run.parent_task_run_id is None and flow != FLOWS[SWEEP_ENTRYPOINT]


def page_url(run: str) -> str | None:
    """The address of a flow run's page in Prefect's UI; None if the server has no UI, as that of a single run."""
    return f"{PREFECT_UI_URL.value()}/runs/flow-run/{run}" if PREFECT_UI_ENABLED.value() else None


def _state_name(run: Any) -> str:
    return run.state.name if run.state else "without a state"


@contextlib.contextmanager
def settings_with(section: str, **values: Any) -> Iterator[None]:
    """Changes values of a section of Prefect's settings in the block. Prefect's own `temporary_settings` reads the
    environment and files again for each of fifty sections, which takes longer than a cached stage."""
    context = get_settings_context()
    changed = getattr(context.settings, section).model_copy(update=values)
    settings = context.settings.model_copy(update={section: changed})
    with SettingsContext(profile=context.profile, settings=settings):
        yield


# A restart of the server takes about three seconds.
AWAY_WAIT_S = 5.0
PROBE_S = 3.0


def server_answers() -> bool:
    """Whether the Prefect server answers, now or within some seconds."""
    deadline = time.monotonic() + AWAY_WAIT_S
    with settings_with("client", max_retries=0):
        client = get_client(sync_client=True, httpx_settings={"timeout": PROBE_S})
        while client.api_healthcheck() is not None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)
    return True


def save_final_state(run: str, state: StateType) -> None:
    """Saves the final state of the flow run, to be delivered later."""
    write_atomically(Outbox(run).folder / PENDING_STATE, state.value.encode())


def has_pending_state(run: str | None) -> bool:
    """Whether the final state of this flow run has yet to be delivered."""
    return run is not None and (Outbox(run).folder / PENDING_STATE).is_file()


def list_pending() -> list[str]:
    """The flow runs of this home whose final state has yet to be delivered."""
    return sorted(path.parent.name for path in home().glob(f"runs/*/{PENDING_STATE}"))


def deliver_final_states() -> None:
    """Sends the saved final states to the server. A state that cannot be sent stays pending."""
    for path in home().glob(f"runs/*/{PENDING_STATE}"):
        # The claim fails for a run that is being retried, which will report its state itself.
        with contextlib.suppress(Exception), Outbox(path.parent.name).claim_run() as claimed:
            if claimed:
                _deliver(path.parent.name, StateType(path.read_text()))
                path.unlink()


def _deliver(run: str, state: StateType) -> None:
    message = "Reported later: the Prefect server was down when the run ended."
    with get_client(sync_client=True) as client:
        current = client.read_flow_run(run).state  # type: ignore[arg-type]
        # The server's automation may have crashed the run, as heartbeats stopped while the server was down.
        if current is None or not current.is_final() or current.is_crashed():
            client.set_flow_run_state(run, State(type=state, message=message), force=True)
