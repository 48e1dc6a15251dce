"""Threads, locks and pools of simulated processes, in place of those of `threading` and `concurrent.futures`.

They differ where the code under simulation does not: `notify` wakes all, each thread is a daemon, and a free lock is
taken without a step of the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from greenlet import getcurrent

from tests.simulate.world import Killed, Task, process, world


class Lock:
    """`threading.Lock` of simulated threads."""

    def __init__(self) -> None:
        self._holder: object = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._holder is not None and blocking:
            world().wait(lambda: self._holder is None, math.inf if timeout < 0 else timeout)
        if self._holder is not None:
            return False
        self._holder = getcurrent()
        return True

    def release(self) -> None:
        if self._holder is None:
            raise RuntimeError("release unlocked lock")
        self._holder = None

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition(Lock):
    """`threading.Condition` of simulated threads."""

    def __init__(self, lock: object = None) -> None:
        super().__init__()
        self._generation = 0

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        ends = world().now + (math.inf if timeout is None else timeout)
        while not (result := predicate()) and world().now < ends:
            self.wait(ends - world().now)
        return result

    def wait(self, timeout: float | None = None) -> bool:
        seen = self._generation
        self.release()
        world().wait(lambda: self._generation != seen, math.inf if timeout is None else timeout)
        self.acquire()
        return self._generation != seen

    def notify_all(self) -> None:
        self._generation += 1

    notify = notify_all


class Thread:
    """`threading.Thread` of simulated processes, which end with their main thread."""

    def __init__(self, group: None = None, target: Any = None, name: str = "", args: Any = (), **options: Any) -> None:
        self._target, self._args, self.name, self.daemon = target, args, name or "thread", True
        self._task: Task | None = None

    def start(self) -> None:
        """Starts it."""
        if not process().is_alive:
            raise Killed
        self._task = Task(process(), self.name, lambda: self._target(*self._args))

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        world().wait(lambda: not self.is_alive(), math.inf if timeout is None else timeout)


class Timer(Thread):
    """`threading.Timer` of simulated processes."""

    def __init__(self, interval: float, function: Callable[..., Any]) -> None:
        self._is_cancelled = False

        def later() -> None:
            world().sleep(interval)
            if not self._is_cancelled:
                function()

        super().__init__(target=later, name="timer")

    def cancel(self) -> None:
        """Keeps it from calling its function."""
        self._is_cancelled = True


class Future:
    """A call in a thread of `Pool`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._error, self._result = call, None, None  # type: ignore[var-annotated]
        self.is_cancelled = False
        self.is_done = False

    def run(self) -> None:
        """Makes the call."""
        if not self.is_cancelled:
            try:
                self._result = self._call()
            except Exception as error:
                self._error = error
        self.is_done = True

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the result."""
        if not self.is_done:
            world().wait(lambda: self.is_done)
        if self._error:
            raise self._error
        return self._result


class Pool:
    """`concurrent.futures.ThreadPoolExecutor` of simulated threads: each call has one of its own."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "") -> None:
        self._futures: list[Future] = []
        self._name = thread_name_prefix

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        """Starts the call."""
        future = Future(lambda: call(*args))
        self._futures.append(future)
        Thread(target=future.run, name=f"{self._name}{len(self._futures)}").start()
        return future

    def map(self, call: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        """The results, in order."""
        return (future.result() for future in [self.submit(call, item) for item in items])

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Waits for the calls; with `cancel_futures`, those that have not begun are dropped."""
        for future in self._futures:
            future.is_cancelled = future.is_cancelled or cancel_futures
        if wait and not all(future.is_done for future in self._futures):
            world().wait(lambda: all(future.is_done for future in self._futures))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
