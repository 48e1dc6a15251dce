"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 90.0) -> float:
    """Waits until the condition is true, and returns the seconds that this took. Looks often first, then five times a
    second."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"waited in vain for {timeout_s:g} s"
        time.sleep(min(0.2, 0.01 + waited_s / 20))
    return time.monotonic() - began
