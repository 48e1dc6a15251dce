"""The version that is served: it follows an alias, and is loaded again when its program ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from tasks.jobs.launch import JobFailed
from tasks.registry.model_spec import ModelSpec, find_model, read_by
from tasks.registry.versions import find_version_number
from tasks.reports.formatting import first_line
from tasks.serving.model_process import ProcessLost
from tasks.tracking.connection import MlflowFailed
from training.problems import UserError

FOLLOW_S = 2.0
"""Between two looks at the alias."""
LONGEST_PAUSE_S = 300.0
"""Between two attempts to load a version."""
MOST_WAITING = 512
"""Requests that may wait for answers at once."""
TRIAL_S = 60.0
"""A version that is to take over answers its first request within this time."""
LOADING_S = 120.0
"""A request waits so long for a version that is loaded again."""


class Process(Protocol):
    """A version that is loaded: a ModelProcess, or a server of another project."""

    model: ModelSpec

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def explain_end(self) -> str: ...


AnyProcess = TypeVar("AnyProcess", bound=Process)


class Busy(Exception):
    """Too many requests wait."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"{MOST_WAITING} requests wait: try again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


class NotLoaded(Exception):
    """No version is loaded at present."""


class ServedModel(Generic[AnyProcess]):
    """A registered model; one of its versions answers.

    Args:
        name: of the model.
        alias: the alias to follow; empty for the champion's.
        version: a version's number, which is served whatever happens to aliases.
        task: the user's own task type, `module:Class`, whose code may run.
        load: makes the process of a version, with a function to call when the process ends.
        tell: receives a line for the operator.
    """

    def __init__(
        self,
        name: str,
        alias: str,
        version: str,
        task: str,
        load: Callable[[ModelSpec, Callable[[AnyProcess], None]], AnyProcess],
        tell: Callable[[str], None],
    ) -> None:
        self.name, self._alias, self._version, self._task = name, alias, version, task
        self._load, self._tell = load, tell
        self.current: AnyProcess | None = None
        self.failed: str | None = None
        """Why the version that the alias has now is not served."""
        self.trial: Callable[[AnyProcess], Awaitable[str | None]] | None = None
        """Sends a request that was answered before to a version that is to take over; returns how it fails."""
        self.waiting = 0
        """Requests without a whole answer."""
        self.switches = 0
        self._loaded, self._ended = asyncio.Event(), asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()
        self._mean_s = 1.0
        """The mean time of a request."""
        self._said = ""
        self._last: ModelSpec | None = None
        """The version that was loaded last."""

    async def start(self) -> None:
        """Loads the version. Raises UserError, MlflowFailed, and JobFailed if it cannot be loaded."""
        model = await asyncio.to_thread(self._find, self._version)
        self._tell(f"loading {model.name} version {model.version}: about 10 seconds")
        await self._serve(model)

    @property
    def model(self) -> ModelSpec:
        """The version that answers, which there is after `start`."""
        assert self.current is not None
        return self.current.model

    async def follow(self) -> None:
        """Serves the version that has the alias, until it is cancelled. A version that cannot be loaded leaves the one
        before in its place, and is tried again after a pause that grows."""
        tried, pause_s, again_s = "", FOLLOW_S, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), FOLLOW_S)
            self._ended.clear()
            wanted, serves = "", self.current.model.version if self.current else ""
            try:
                wanted = self._version or await asyncio.to_thread(find_version_number, self.name, self._alias)
                if wanted != serves and not (wanted == tried and time.monotonic() < again_s):
                    await self._serve(await asyncio.to_thread(self._find, wanted))
                    serves = wanted
                if wanted == serves:
                    tried, pause_s, self.failed, self._said = "", FOLLOW_S, None, ""
            except MlflowFailed as error:
                if self.current is None and self._last is not None:  # its files may be in the store
                    with contextlib.suppress(Exception):
                        await self._serve(self._last)
                self._say(f"{first_line(error)} The alias is not followed.")
            except Exception as error:
                if not isinstance(error, UserError | JobFailed | NotLoaded | ProcessLost | OSError):
                    traceback.print_exc()
                reason = f"Version {wanted} is not loaded: {first_line(error)}" if wanted else first_line(error)
                self._say(f"{reason} " + (f"Version {serves} goes on answering." if serves else "Nothing answers."))
                self.failed = f"version {wanted} is not loaded: the log has the reason"
                if wanted:
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if wanted == tried else FOLLOW_S
                    tried, again_s = wanted, time.monotonic() + pause_s

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[AnyProcess]:
        """The version that answers a request, which stays loaded during the block. Raises Busy and NotLoaded."""
        if self.waiting >= MOST_WAITING:
            raise Busy(max(1, math.ceil(self._mean_s)))
        self.waiting += 1
        began_s = time.monotonic()
        try:
            try:
                async with asyncio.timeout(LOADING_S):
                    while (process := self.current) is None:
                        await self._loaded.wait()
            except TimeoutError:
                raise NotLoaded(f"{self.name} is being loaded: try again later.") from None
            yield process
        finally:
            self.waiting -= 1
            self._mean_s += 0.1 * (time.monotonic() - began_s - self._mean_s)

    async def stop(self) -> None:
        """Ends all programs, after their last answers."""
        process, self.current = self.current, None
        if process is not None:
            await process.stop()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _find(self, version: str) -> ModelSpec:
        return read_by(find_model(self.name, "" if version else self._alias, version, self._task))

    async def _serve(self, model: ModelSpec) -> None:
        """Loads a version, and lets it answer from the next request on."""
        process = self._load(model, self._on_end)
        await process.start()
        if failure := await self._find_failure(process):
            await process.stop()
            raise NotLoaded(failure)
        self._last = model
        before, self.current = self.current, process
        self._loaded.set()
        place = f", in place of version {before.model.version}" if before else ""
        self._tell(f"{model.name} version {model.version} answers{place}.")
        if before is not None:
            self.switches += 1
            self._in_background(before.stop())

    async def _find_failure(self, process: AnyProcess) -> str | None:
        """Why a version cannot take over; None if it can."""
        if self._last is not None and self._last.task["task"] != process.model.task["task"]:
            return "It is for another task type than the version before, and needs another API: start the server anew."
        try:
            async with asyncio.timeout(TRIAL_S):
                failure = await self.trial(process) if self.trial is not None else None
        except TimeoutError:
            failure = f"no answer within {TRIAL_S:g} s"
        return f"It fails on a request that was answered before: {failure}" if failure else None

    def _on_end(self, process: AnyProcess) -> None:
        """The program of a version has ended without being asked to."""
        if self.current is process:
            self.current = None
            self._loaded.clear()
            self._ended.set()
        self._in_background(self._explain(process))

    async def _explain(self, process: AnyProcess) -> None:
        reason = await asyncio.to_thread(process.explain_end)
        self._tell(f"The program of version {process.model.version} has ended. {reason}")
        await process.stop()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _say(self, text: str) -> None:
        """Tells the operator, once."""
        if text != self._said:
            self._said = text
            self._tell(text)
