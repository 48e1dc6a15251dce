"""Promises that a drill looks at: kept, broken, or not to be tried here."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable


class Broken(Exception):
    """A promise that was not kept."""


class Skipped(Exception):
    """It cannot be tried here."""


def require(held: bool, otherwise: str) -> None:
    """Raises Broken with the words where a promise does not hold."""
    if not held:
        raise Broken(otherwise)


def judge(name: str, play: Callable[[], str | None]) -> str:
    """Runs the function, and prints and returns its result: `as promised`, `skipped` or `FAULT`, with the text that it
    returned or the error that it raised."""
    began = time.monotonic()
    try:
        about = play()
        result = f"as promised: {about}" if about else "as promised"
    except Skipped as reason:
        result = f"skipped: {reason}"
    except (Broken, AssertionError) as fault:
        result = f"FAULT: {fault}"
    except Exception:
        result = f"FAULT: {traceback.format_exc()}"
    print(f"{name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
    return result
