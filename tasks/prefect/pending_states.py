"""Final states of runs that ended while their Prefect server was away: kept, and delivered when it is back.

<home>/runs/<flow run>/pending_state    the type of the state that the server does not have yet
"""

from __future__ import annotations

import contextlib
import time

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.cache import settings
from tasks.tracking.outbox import PENDING_STATE, Outbox
from training.jobs.protocol import write_atomically

# A restart of the server takes some three seconds.
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
    """Keeps the final state of the flow run for the server."""
    write_atomically(Outbox(run).folder / PENDING_STATE, state.value.encode())


def is_pending(run: str | None) -> bool:
    """Whether the server has still to receive the final state of this flow run."""
    return run is not None and (Outbox(run).folder / PENDING_STATE).is_file()


def pending_runs() -> list[str]:
    """The flow runs of this home whose final state the server has still to receive."""
    return sorted(path.parent.name for path in settings.home().glob(f"runs/*/{PENDING_STATE}"))


def deliver() -> None:
    """Sends the server the final states of earlier runs. A state that cannot be sent now stays pending."""
    for path in settings.home().glob(f"runs/*/{PENDING_STATE}"):
        # Claimed: a run that is being retried will report its own state.
        with contextlib.suppress(Exception), Outbox(path.parent.name).claim_run() as mine:
            if mine:
                _deliver(path.parent.name, StateType(path.read_text()))
                path.unlink()


def _deliver(run: str, state: StateType) -> None:
    message = "Reported afterwards: the Prefect server was away when the run ended."
    with get_client(sync_client=True) as client:
        known = client.read_flow_run(run).state  # type: ignore[arg-type]
        # The automation crashes a run whose heartbeats stopped together with the server.
        if known is None or not known.is_final() or known.is_crashed():
            client.set_flow_run_state(run, State(type=state, message=message), force=True)
