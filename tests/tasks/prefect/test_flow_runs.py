"""Flow runs at the server: the one that `finetune resume` continues, and ends of runs whose server was away."""

from __future__ import annotations

import json
import os
import re
import threading
import uuid
from pathlib import Path

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import Abort
from prefect.flow_engine import FlowRunEngine
from prefect.runtime import flow_run
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    get_current_settings,
    temporary_settings,
)
from prefect.states import Cancelling, Completed, Crashed, Running, Scheduled, State

from tasks import servers
from tasks.prefect import events, flow_runs
from tasks.prefect.automations import FAILURE_BODY
from tasks.prefect.events import without_prefect_heartbeats
from tasks.prefect.flow_runs import RESUMABLE, find, report_killed
from tasks.tracking.outbox import Outbox, running
from tests.servers import closed_port
from training.problems import UserError


@flow(name="finetune")
def ours() -> None:
    """Never run."""


@flow(name="drift")
def looks() -> None:
    """Never run."""


@flow(name="somebody-elses")
def other() -> None:
    """Never run."""


def begun(client: SyncPrefectClient, ends: State[None] | None, of: object = ours) -> FlowRun:
    run = client.create_flow_run(of, state=Running())  # type: ignore[arg-type]
    if ends is not None:
        client.set_flow_run_state(run.id, ends, force=True)
    return client.read_flow_run(run.id)


def test_the_last_incomplete_run_is_resumed_and_none_that_runs_here_or_elsewhere(
    prefect_server: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with get_client(sync_client=True) as client:
        crashed, killed = begun(client, Crashed()), begun(client, None)
        elsewhere, completed = begun(client, None), begun(client, Completed())
        foreign = begun(client, Crashed(), other)
        begun(client, Crashed(), looks)  # a drift report is started again, not resumed
        taken_for_dead = begun(client, Crashed())
    with Outbox(str(killed.id)).claim_run(), Outbox(str(taken_for_dead.id)).claim_run():
        assert find(None).id == crashed.id
        for run, state in ((killed, "Running"), (taken_for_dead, "Crashed")):
            with pytest.raises(
                UserError, match=f"{run.id} still runs here, although its state at the server is {state}"
            ):
                find(str(run.id))
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(taken_for_dead.id, Completed(), force=True)
    assert find(None).id == killed.id == find(str(killed.id)[:13]).id
    for run, reason in ((elsewhere, "is Running, here or elsewhere"), (completed, "is Completed: a new run")):
        with pytest.raises(UserError, match=f"{run.id} {reason}"):
            find(str(run.id))
    with pytest.raises(UserError, match="no flow run"):
        find(str(foreign.id))
    later = elsewhere.model_copy(update={"auto_scheduled": True, "state": Scheduled()})
    monkeypatch.setattr(flow_runs, "_read_recent", lambda client: [later, completed, elsewhere])
    with pytest.raises(UserError, match=rf"no run that did not complete; {elsewhere.id} is Running\.$"):
        find(None)


def test_a_server_that_died_with_its_runs_gets_their_ends_and_no_others(prefect_server: None, home: Path) -> None:
    with get_client(sync_client=True) as client:
        killed, cancelled, alive, elsewhere = (begun(client, None) for _ in range(4))
        client.set_flow_run_state(cancelled.id, Cancelling(), force=True)
        for run in (killed, cancelled):
            Outbox(str(run.id))
        with Outbox(str(alive.id)).claim_run():
            report_killed()
        found = [client.read_flow_run(run.id).state_type for run in (killed, cancelled, alive, elsewhere)]
    assert found == [StateType.CRASHED, StateType.CANCELLED, StateType.RUNNING, StateType.RUNNING]


@pytest.mark.parametrize(
    ("name", "within", "resumable"),
    [
        ("finetune", False, True),
        ("retrain", False, True),
        ("finetune", True, False),  # the release of a sweep's best trial
        ("sweep", False, False),
        ("trial", True, False),
        ("labels", False, False),
    ],
)
def test_resume_is_advised_for_killed_runs_of_commands_that_it_continues(
    prefect_server: None, home: Path, name: str, within: bool, resumable: bool
) -> None:
    with get_client(sync_client=True) as client:
        sweep = client.create_flow_run(flow(name="sweep")(lambda: None), state=Running())
        parent = client.create_task_run(task(lambda: None), sweep.id, dynamic_key="0").id if within else None
        called = flow(name=name)(lambda: None)
        run = client.create_flow_run(called, state=Running(), parent_task_run_id=parent)
        Outbox(str(run.id))
        report_killed()
        state = client.read_flow_run(run.id).state
    assert state is not None and state.is_crashed() and ("resume" in str(state.message)) == resumable


def test_a_killed_run_that_looks_at_a_registered_model_is_reported_and_not_said_to_be_resumable(
    prefect_server: None, home: Path
) -> None:
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(looks, parameters={"model": "small"}, state=Running())  # type: ignore[arg-type]
        with running(str(run.id)):
            report_killed()
            alive = client.read_flow_run(run.id).state_type
        assert alive == StateType.RUNNING and not (home / "runs" / str(run.id)).exists()
        Outbox(str(run.id))  # what a killed process leaves
        report_killed(silent_s=60.0)  # as long as another process may only just have ended
        assert client.read_flow_run(run.id).state_type == StateType.RUNNING
        report_killed()
        state = client.read_flow_run(run.id).state
    assert state is not None and state.is_crashed() and "resume" not in str(state.message)


@flow(name="finetune")
def stopped() -> None:
    """Ends as a run that a signal interrupts."""
    with events.emit_heartbeats(str(flow_run.get_id())):
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("by_down", [True, False])
def test_a_run_that_down_stops_is_cancelled_and_can_be_resumed_and_any_other_that_is_ended_is_crashed(
    prefect_server: None, home: Path, monkeypatch: pytest.MonkeyPatch, by_down: bool
) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "of a worker")
    with servers.process_manager_lock():
        servers.write_state(servers.ServicesState(pid=os.getpid(), prefect=None, mlflow=None, stopping=by_down))
        with pytest.raises(Abort if by_down else KeyboardInterrupt):
            stopped()
    found = find(None)
    assert found.state is not None
    assert (found.state.name, found.state.type) == (("Cancelled", "CANCELLED") if by_down else ("Crashed", "CRASHED"))
    message = (
        f"Stopped by `finetune down`, or by the end of `finetune up`. Continue it with `finetune resume {found.id}`."
    )
    assert (found.state.message == message) is by_down


def test_a_run_of_a_command_is_not_stopped_by_down(
    prefect_server: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    with servers.process_manager_lock():
        servers.write_state(servers.ServicesState(pid=os.getpid(), prefect=None, mlflow=None, stopping=True))
        with pytest.raises(KeyboardInterrupt):
            stopped()


def test_a_flow_called_by_a_command_does_not_wait_for_heartbeats_of_prefect_s_own(
    prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Event()
    monkeypatch.setattr(FlowRunEngine, "_emit_flow_run_heartbeat", lambda *_: sent.set())

    @flow
    def waiting(timeout_s: float) -> bool:
        return sent.wait(timeout_s)

    with without_prefect_heartbeats():
        assert waiting(0.5) is False
    assert waiting(10.0) is True  # Prefect still has what the block turns off


def test_reports_on_registered_models_are_started_again_and_not_resumed() -> None:
    assert sorted(RESUMABLE) == ["batch-predict", "finetune", "retrain", "sweep"]
    *_, of_deployments = re.findall(r"flow\.name in \[(.+?)\]", FAILURE_BODY)  # the notification advises the same
    assert sorted(RESUMABLE) == sorted(json.loads(f"[{of_deployments}]"))


def left_running() -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.create_flow_run(ours, state=Running())


def state_of(run: FlowRun) -> StateType | None:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run.id).state_type


@pytest.mark.parametrize("taken_for", [Running(), Crashed()], ids=["running", "crashed"])
@pytest.mark.parametrize("state", [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED])
def test_a_server_that_is_back_gets_the_end_of_a_run_once(
    home: Path, prefect_server: None, state: StateType, taken_for: State
) -> None:
    run = left_running()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, taken_for, force=True)
    flow_runs.save_final_state(str(run.id), state)
    assert flow_runs.has_pending_state(str(run.id))
    flow_runs.deliver_final_states()
    assert state_of(run) == state and not flow_runs.has_pending_state(str(run.id))


def test_a_newer_state_at_the_server_is_left_as_it_is(home: Path, prefect_server: None) -> None:
    run = left_running()
    flow_runs.save_final_state(str(run.id), StateType.FAILED)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Completed(), force=True)  # tried again, elsewhere
    flow_runs.deliver_final_states()
    assert state_of(run) == StateType.COMPLETED


def test_a_run_that_is_tried_again_just_now_is_left_alone(home: Path, prefect_server: None) -> None:
    run = left_running()
    flow_runs.save_final_state(str(run.id), StateType.FAILED)
    with Outbox(str(run.id)).claim_run():
        flow_runs.deliver_final_states()
    assert state_of(run) == StateType.RUNNING


@pytest.mark.slow
def test_a_state_that_cannot_be_delivered_waits_and_holds_up_no_other(home: Path, prefect_server: None) -> None:
    elsewhere, run = str(uuid.UUID(int=0)), left_running()
    for name in (elsewhere, str(run.id)):
        flow_runs.save_final_state(name, StateType.COMPLETED)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{closed_port()}/api"}):
        flow_runs.deliver_final_states()
    assert flow_runs.has_pending_state(elsewhere) and flow_runs.has_pending_state(str(run.id))
    flow_runs.deliver_final_states()
    assert flow_runs.has_pending_state(elsewhere) and not flow_runs.has_pending_state(str(run.id))


def test_a_server_that_is_away_is_known_to_be(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_runs, "AWAY_WAIT_S", 0.5)
    assert flow_runs.server_answers()
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{closed_port()}/api"}):
        assert not flow_runs.server_answers()


def test_settings_of_a_block_are_those_of_prefects_own_way_and_end_with_it() -> None:
    with temporary_settings({}):  # as the environment is now, which other tests have changed
        before = get_current_settings()
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            theirs = get_current_settings()
        with flow_runs.settings_with("client", max_retries=0):
            assert PREFECT_CLIENT_MAX_RETRIES.value() == 0
            ours = get_current_settings()
        assert get_current_settings() is before and PREFECT_CLIENT_MAX_RETRIES.value() > 0
    assert ours == theirs
    assert ours.to_environment_variables(exclude_unset=True) == theirs.to_environment_variables(exclude_unset=True)
