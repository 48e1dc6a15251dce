"""What the command's exit status means."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from types import FrameType

from training.problems import DISK, NETWORK

COMPLETED, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

# Kinds of failure that are not the user's mistake.
FAILURES = {"internal", "out_of_memory", "interrupted", "lost_rank", "stalled", "not_started", DISK, NETWORK}


def code_of(kinds: Iterable[str]) -> int:
    """The exit status for problems of these kinds: one mistake is enough to make it the user's turn."""
    return FAILED if FAILURES.issuperset(kinds) else USER_ERROR


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In the block SIGTERM is what Ctrl-C is: things are put away, and the exit status is INTERRUPTED."""
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal's handler that does what Ctrl-C does."""
    raise KeyboardInterrupt
