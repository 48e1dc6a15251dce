"""How long a stage that goes on will still take."""

from __future__ import annotations

import time


class Pace:
    """Follows one stage, from its first sign of progress on: imports take seconds, and a resumed training starts in the
    middle."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def left_s(self, done: int, total: int) -> float | None:
        """Seconds until all is done, at the speed so far; None before there is one."""
        now = time.monotonic()
        if self._first is None or done < self._first[1]:  # another part of the stage has begun
            self._first = (now, done)
        since, before = self._first
        return (now - since) / (done - before) * (total - done) if done > before else None
