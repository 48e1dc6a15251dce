"""How runs ended whose Prefect server was away."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed, Running

from tasks.prefect import pending_states
from tasks.tracking.outbox import Outbox
from tests.servers import closed_port


@flow
def finetune() -> None:
    """Never called: the server wants a flow for its runs."""


def left_running() -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.create_flow_run(finetune, state=Running())


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
    pending_states.save(str(run.id), state)
    assert pending_states.is_pending(str(run.id))
    pending_states.deliver()
    assert state_of(run) == state and not pending_states.is_pending(str(run.id))


def test_a_newer_state_at_the_server_is_left_as_it_is(home: Path, prefect_server: None) -> None:
    run = left_running()
    pending_states.save(str(run.id), StateType.FAILED)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Completed(), force=True)  # tried again, elsewhere
    pending_states.deliver()
    assert state_of(run) == StateType.COMPLETED


def test_a_run_that_is_tried_again_just_now_is_left_alone(home: Path, prefect_server: None) -> None:
    run = left_running()
    pending_states.save(str(run.id), StateType.FAILED)
    with Outbox(str(run.id)).claim_run():
        pending_states.deliver()
    assert state_of(run) == StateType.RUNNING


def test_a_state_that_cannot_be_delivered_waits_and_holds_up_no_other(home: Path, prefect_server: None) -> None:
    elsewhere, run = str(uuid.UUID(int=0)), left_running()
    for name in (elsewhere, str(run.id)):
        pending_states.save(name, StateType.COMPLETED)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{closed_port()}/api"}):
        pending_states.deliver()
    assert pending_states.is_pending(elsewhere) and pending_states.is_pending(str(run.id))
    pending_states.deliver()
    assert pending_states.is_pending(elsewhere) and not pending_states.is_pending(str(run.id))


def test_a_server_that_is_away_is_known_to_be(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_states, "AWAY_WAIT_S", 0.5)
    assert pending_states.server_answers()
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{closed_port()}/api"}):
        assert not pending_states.server_answers()
