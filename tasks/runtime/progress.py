"""Prefect's view of a long stage: a progress artifact, and log lines at each evaluation."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from tasks.runtime.stage import Row

# One update costs the server some 40 ms.
UPDATE_S = 2.0
# How long a run that has ended waits for a server that answers slowly.
END_WAIT_S = 5.0
# A busy server refuses now and then; nothing comes after a stage's last update to make up for it.
TRIES = 3
RETRY_S = 0.5


class PrefectProgress:
    """Watches a run and tells Prefect, from a thread, so that a slow or dead server delays no stage."""

    def __init__(self) -> None:
        # Behind a slow server updates pile up: of each stage only the newest is worth sending.
        self._newest: dict[str, float] = {}
        # A bar belongs to the task run in which the stage's progress is first told.
        self._contexts: dict[str, contextvars.Context] = {}
        self._news, self._ended = threading.Event(), False
        self._sent_at = 0.0
        self._shown = False
        self._thread = threading.Thread(target=self._update, name="prefect-progress", daemon=True)
        self._thread.start()

    def stage_started(self, stage: str, key: str) -> None:
        """Nothing yet: a cached stage has no progress."""
        self._shown = False

    def stage_waits(self, stage: str) -> None:
        """Says in the log that another run makes the same thing."""
        get_run_logger().info("%s: another run makes the same artifact; waiting for it", stage)

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        """Moves the bar, at most every two seconds, and logs figures and warnings."""
        for event in events:
            if event["kind"] in ("warning", "note"):
                level = logging.WARNING if event["kind"] == "warning" else logging.INFO
                get_run_logger().log(level, "%s: %s", stage, event["message"])
            elif event["kind"] == "metrics":
                figures = ", ".join(f"{name} {value:.4g}" for name, value in event["values"].items())
                get_run_logger().info("%s: step %s: %s", stage, event["step"], figures)
        done = [event for event in events if event["kind"] == "progress" and event.get("total")]
        if done and time.monotonic() - self._sent_at >= UPDATE_S:
            self._show(stage, 100.0 * done[-1]["done"] / done[-1]["total"])

    def stage_ended(self, row: Row, result: Any) -> None:
        """Fills the bar of a stage that ended well."""
        if self._shown and row.state != "failed":
            self._show(row.name, 100.0)

    def end(self) -> None:
        """Sends what is left, within reason. To be called inside the flow, whose connection to the server it uses."""
        self._ended = True
        self._news.set()
        self._thread.join(END_WAIT_S)

    def _show(self, stage: str, percent: float) -> None:
        self._sent_at = time.monotonic()
        self._shown = True
        self._contexts.setdefault(stage, contextvars.copy_context())
        self._newest[stage] = percent
        self._news.set()

    def _update(self) -> None:
        bars: dict[str, UUID] = {}
        last = False
        while not last:
            self._news.wait()
            self._news.clear()
            last = self._ended
            for stage in list(self._newest):
                self._send(stage, self._newest.pop(stage), bars)

    def _send(self, stage: str, percent: float, bars: dict[str, UUID]) -> None:
        """Makes or moves the stage's bar. A server that stays down costs its view, and nothing else."""
        # The context knows the server, too: without it Prefect would start another one for the update.
        context = self._contexts[stage]
        for _ in range(TRIES):
            with contextlib.suppress(Exception):
                if stage in bars:
                    context.run(update_progress_artifact, artifact_id=bars[stage], progress=percent)
                else:
                    bars[stage] = context.run(_create, stage, percent)
                return
            time.sleep(RETRY_S)


def _create(stage: str, percent: float) -> UUID:
    made = create_progress_artifact(
        percent, key=f"finetune-{stage.replace('_', '-')}", description=f"Progress of {stage}"
    )
    assert isinstance(made, UUID)  # a coroutine only inside an event loop
    return made
