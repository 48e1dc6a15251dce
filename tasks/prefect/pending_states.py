"""Final states of runs that ended while their Prefect server was down: kept in the home, and delivered later.

<home>/runs/<flow run>/pending_state    the type of the state that the server does not have yet
"""

from __future__ import annotations

import contextlib
import time

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.home import home
from tasks.tracking.outbox import PENDING_STATE, Outbox
from training.jobs.protocol import write_atomically

# A restart of the server takes about three seconds.
AWAY_WAIT_S = 5.0
PROBE_S = 3.0


def server_answers() -> bool:
    """Whether the Prefect server answers, now or within some seconds."""
    deadline = time.monotonic() + AWAY_WAIT_S
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        client = get_client(sync_client=True, httpx_settings={"timeout": PROBE_S})
        while client.api_healthcheck() is not None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)
    return True


def save(run: str, state: StateType) -> None:
    """Saves the final state of the flow run, to be delivered later."""
    write_atomically(Outbox(run).folder / PENDING_STATE, state.value.encode())


def is_pending(run: str | None) -> bool:
    """Whether the final state of this flow run has yet to be delivered."""
    return run is not None and (Outbox(run).folder / PENDING_STATE).is_file()


def pending_runs() -> list[str]:
    """The flow runs of this home whose final state has yet to be delivered."""
    return sorted(path.parent.name for path in home().glob(f"runs/*/{PENDING_STATE}"))


def deliver() -> None:
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
