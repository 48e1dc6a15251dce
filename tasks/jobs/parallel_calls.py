"""Calls that run at once, each in a thread, whose jobs have GPUs of their own.

Cores are not divided: the number of threads changes how sums are rounded, and a training must end with the weights that
it has by itself. The system shares the cores among the processes.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tasks.jobs.engines.local import STOP_GRACE_S
from tasks.jobs.hardware import assigned_gpus, visible_gpus
from tasks.locks import cancelled

STOP_WITHIN_S = STOP_GRACE_S + 10.0
"""For the jobs to save and for their runs to be reported. A thread that hangs longer ends with this process, and its
jobs with it."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class ParallelCalls(Generic[Item, Result]):
    """Runs a function for several items at once, each in a thread with a copy of this context. A block that ends with
    an error interrupts all of them, and waits for at most `STOP_WITHIN_S`: their jobs may save a checkpoint first.

    Args:
        count: the most items at once.
        call: the function; its jobs see only the GPUs of their share.
        divides_gpus: whether the machine's GPUs are divided among the calls. Those of a cluster are not: the cluster
            places its jobs itself.
    """

    def __init__(self, count: int, call: Callable[[Item], Result], divides_gpus: bool = True) -> None:
        gpus = visible_gpus() if divides_gpus else []
        self._call = call
        self._shares: list[list[str] | None] = (
            [gpus[share::count] for share in range(count)] if gpus else [None] * count
        )
        self._ended: queue.Queue[tuple[threading.Thread, list[str] | None, Item, Result | BaseException]] = (
            queue.Queue()
        )
        self._running: set[threading.Thread] = set()
        self._stop = threading.Event()

    @property
    def free(self) -> int:
        """How many more items may start now."""
        return len(self._shares)

    @property
    def busy(self) -> int:
        """How many items run."""
        return len(self._running)

    def start(self, item: Item) -> None:
        """Starts the function for an item. Raises IndexError if none is `free`."""
        share = self._shares.pop(0)
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(self._run, thread, share, item), daemon=True)
        self._running.add(thread)
        thread.start()

    def wait(self, timeout_s: float | None = None) -> Iterator[tuple[Item, Result]]:
        """Yields the items that have ended with their results, after one has, or nothing after `timeout_s`. Raises the
        error of the first that failed."""
        while self._running:
            try:
                thread, share, item, result = self._ended.get(timeout=timeout_s)
            except queue.Empty:
                return
            self._running.discard(thread)
            self._shares.append(share)
            if isinstance(result, BaseException):
                raise result
            yield item, result
            timeout_s = 0

    def __enter__(self) -> ParallelCalls[Item, Result]:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            return
        self._stop.set()
        deadline = time.monotonic() + STOP_WITHIN_S
        for thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, thread: threading.Thread, share: list[str] | None, item: Item) -> None:
        assigned_gpus.set(share)
        cancelled.set(self._stop)
        result: Result | BaseException
        try:
            result = self._call(item)
        except BaseException as error:
            result = error
        self._ended.put((thread, share, item, result))
