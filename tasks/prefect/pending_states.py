"""How a run ended while its Prefect server was away: kept, and told when the server is back.

<home>/runs/<flow run>/untold    the type of the state that the server does not know
"""

from __future__ import annotations

import contextlib
import time

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.cache import settings
from tasks.tracking.outbox import UNTOLD, Outbox
from training.jobs.protocol import write_atomically

# A server that restarts needs some three seconds.
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


def keep(run: str, state: StateType) -> None:
    """Notes how the flow run ended."""
    write_atomically(Outbox(run).folder / UNTOLD, state.value.encode())


def waits(run: str | None) -> bool:
    """Whether the server was away when this flow run ended."""
    return run is not None and (Outbox(run).folder / UNTOLD).is_file()


def left() -> list[str]:
    """The flow runs of this home whose end the server has still to be told."""
    return sorted(path.parent.name for path in settings.home().glob(f"runs/*/{UNTOLD}"))


def tell() -> None:
    """Tells the server how earlier runs ended. What it does not know, or is not told now, waits on."""
    for path in settings.home().glob(f"runs/*/{UNTOLD}"):
        # Claimed: a run that is tried again just now will tell by itself.
        with contextlib.suppress(Exception), Outbox(path.parent.name).claimed() as mine:
            if mine:
                _tell(path.parent.name, StateType(path.read_text()))
                path.unlink()


def _tell(run: str, state: StateType) -> None:
    message = "Told afterwards: the Prefect server was away when the run ended."
    with get_client(sync_client=True) as client:
        known = client.read_flow_run(run).state  # type: ignore[arg-type]
        # One that fell silent together with the server was taken for dead.
        if known is None or not known.is_final() or known.is_crashed():
            client.set_flow_run_state(run, State(type=state, message=message), force=True)
