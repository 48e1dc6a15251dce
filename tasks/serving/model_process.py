"""A version of a registered model in a child program, and the requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from tasks.cache.garbage_collection import in_use
from tasks.jobs.commands import python_argv
from tasks.jobs.launch import EventReader, follow_job, require_finished
from tasks.registry.model_spec import ModelSpec
from tasks.registry.pinned_versions import find_folders_for_job
from tasks.serving.responses import RequestRefused, Said
from training.jobs.protocol import EVENTS, Job, Outcome
from training.models.repository_files import chat_template
from training.programs.serve import (
    ASKED,
    READY,
    SAID,
    Generate,
    Predict,
    ServeSettings,
    Stop,
    Text,
    socket_path,
)

PROGRAM = "training.programs.serve"
POLL_S = 0.05
NEVER_STALLED_S = float("inf")
"""Hours may pass between two requests."""
MAX_DEPTH = 100
"""Of objects and lists in one another in a request: the program's parser has a limit too."""
END_S = 5.0
"""A program ends so soon after its connection."""
LONGEST_LINE_BYTES = 256 * 2**20


class ProcessLost(Exception):
    """The program ended before it answered a request."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the program of the model ended before it answered: send the request again.")


class ModelProcess:
    """A version that is loaded, until `stop`.

    Args:
        model: the version.
        batch_size: rows in one forward pass.
        on_end: called in the event loop when the program has ended, unless `stop` ended it.
    """

    def __init__(self, model: ModelSpec, batch_size: int, on_end: Callable[[ModelProcess], None]) -> None:
        self.model = model
        self._batch_size, self._on_end = batch_size, on_end
        self._files = contextlib.ExitStack()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[Said | None]] = {}
        self._unsent = list[bytes]()
        self._idle = asyncio.Event()
        self._stopping = False
        self.has_chat_template = False
        """Whether the tokenizer has one; known after `start`."""

    async def start(self) -> None:
        """Loads the model. Raises UserError, MlflowFailed and OSError, and JobFailed or ProcessLost if the program ends
        before it is ready."""
        launching = asyncio.create_task(asyncio.to_thread(self._launch))
        try:
            self._job, self._looks = await asyncio.shield(launching)
            with socket_path(self._job) as path:
                try:
                    self._reader, self._writer = await asyncio.open_unix_connection(path, limit=LONGEST_LINE_BYTES)
                except ConnectionError as error:
                    raise ProcessLost(await asyncio.to_thread(self.explain_end)) from error
        except BaseException:
            self._stopping = True
            await asyncio.wait({launching})  # its thread ends the program at its next look
            await asyncio.to_thread(self._close)
            raise
        self._receiver = asyncio.create_task(self._receive())

    async def stop(self) -> None:
        """Waits for the answers to all requests, and ends the program."""
        self._stopping = True
        while self._waiting:
            self._idle.clear()
            await self._idle.wait()
        self._writer.close()
        await asyncio.wait({self._receiver}, timeout=END_S)  # a program that hangs is killed by the next line
        await asyncio.to_thread(self._close)
        await self._receiver

    def predict(self, rows: list[Any], prompt: str | None = None) -> Coroutine[Any, Any, Said]:
        """Sends rows, at once; `prompt` is that of Predict. Returns their predictions, when awaited, or raises
        ProcessLost."""
        return _only(self._ask(Predict, rows=rows, prompt=prompt))

    def generate(self, **fields: Any) -> AsyncGenerator[Said]:
        """Sends a request, at once; `fields` are those of Generate. Yields the parts of the answer, and at last the
        whole. Closing the iterator ends the generation. Raises ProcessLost."""
        return self._ask(Generate, **fields)

    def _ask(self, form: type[Predict] | type[Generate], **fields: Any) -> AsyncGenerator[Said]:
        # No coroutine: a request is known before another one runs that may retire this version.
        number = next(self._numbers)
        if _find_depth(fields) > MAX_DEPTH:
            raise RequestRefused(400, f"the body has objects and lists within {MAX_DEPTH} others: give fewer.")
        try:
            line = ASKED.dump_json(form(id=number, **fields))
        except ValueError as error:  # half a surrogate pair, which JSON can hold and UTF-8 cannot
            raise RequestRefused(400, "the body has a text that is not Unicode.") from error
        queue = self._waiting[number] = asyncio.Queue()
        if self._writer.is_closing():
            queue.put_nowait(None)
        self._send(line)
        return self._receive_answer(number, queue)

    async def _receive_answer(self, number: int, queue: asyncio.Queue[Said | None]) -> AsyncGenerator[Said]:
        """Yields the messages of an answer up to the last."""
        said: Said | None = None
        try:
            while said is None or isinstance(said, Text):
                said = await queue.get()
                if said is None:
                    raise ProcessLost()
                yield said
        finally:
            if number in self._waiting:
                self._send(ASKED.dump_json(Stop(id=number)))
                self._forget(number)

    def _forget(self, number: int) -> None:
        """A request has its whole answer, or needs none any more."""
        del self._waiting[number]
        if not self._waiting:
            self._idle.set()

    def _send(self, line: bytes) -> None:
        """Sends a line, in one piece with all others of this turn of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_lines)
        self._unsent += (line, b"\n")

    def _send_lines(self) -> None:
        if not self._writer.is_closing():
            self._writer.write(b"".join(self._unsent))
        self._unsent.clear()

    async def _receive(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a program that is killed may leave a part of a line
            while line := await self._reader.readline():
                said = SAID.validate_json(line)
                if queue := self._waiting.get(said.id):
                    queue.put_nowait(said)
                    if not isinstance(said, Text):  # a client may take its time to read it
                        self._forget(said.id)
        self._writer.close()
        for queue in self._waiting.values():
            queue.put_nowait(None)
        if not self._stopping:
            self._on_end(self)

    def _launch(self) -> tuple[Path, Generator[None, None, Outcome]]:
        """Starts the program, and waits until it is ready."""
        with in_use():
            work, folders = self._files.enter_context(find_folders_for_job("serve", self.model.pinned))
            settings = ServeSettings(
                **self.model.task,
                columns=dict(self.model.columns),
                reading=self.model.rules.model_dump(mode="json"),
                max_length=self.model.max_length,
                batch_size=self._batch_size,
                mixed_precision=self.model.mixed_precision,
                calibration=self.model.calibration,
            )
            inputs = {part: str(folder) for part, folder in folders.items()}
            self.has_chat_template = chat_template(folders["tokenizer"]) is not None
            Job(program=PROGRAM, key=work.key, settings=settings.model_dump(), inputs=inputs).write(work.job)
            events: list[Any] = []
            looks = follow_job(
                work.job,
                python_argv(PROGRAM),
                env={"TOKENIZERS_PARALLELISM": "false"},  # batches are small, and threads would wait for one another
                events=EventReader(work.job / EVENTS, events.extend),
                stall_timeout_s=NEVER_STALLED_S,
                poll_s=POLL_S,
            )
            self._files.callback(looks.close)
            while not self._stopping and not any(event["kind"] == READY for event in events):
                try:
                    next(looks)
                except StopIteration as ended:
                    require_finished(ended.value)
        return work.job, looks

    def explain_end(self) -> str:
        """The reason why the program ended, which takes as long as its processes need to end."""
        try:
            while True:
                next(self._looks)
        except StopIteration as ended:
            failure = ended.value.failure if isinstance(ended.value, Outcome) else None
            return failure.message if failure else "It ended without an error."

    def _close(self) -> None:
        """Ends the program, and removes its files."""
        self._files.close()


def _find_depth(value: Any) -> int:
    """The most objects and lists in one another; MAX_DEPTH + 1 if there are more."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        depth += 1
    return depth


async def _only(answer: AsyncGenerator[Said]) -> Said:
    async with contextlib.aclosing(answer):
        return await anext(answer)
