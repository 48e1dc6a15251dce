"""A listener for tests that read the events of a stage or a job."""

from __future__ import annotations

from typing import Any

from tasks.cache.stage import Listener


class Heard(Listener):
    """Keeps the events that it receives."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        self.events += events
