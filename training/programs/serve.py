"""The program that holds a served model: `python -m training.programs.serve JOB`.

inputs     model, tokenizer (folders, which may be one)
settings   ServeSettings, below
socket     SOCKET in the job's folder: one connection, with a message a line in JSON, each with the `id` of its request
           to it     Predict, Generate, Stop
           from it   Predicted; Text and FinishedAnswer; Refused, Failed
events     `ready` when it listens
output     none

Requests that wait together are one batch, up to the batch size. It ends when the connection ends.
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import socket
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from training import task_types
from training.data.batch_requests import plain_message
from training.data.casting import to_batch
from training.data.conversation_forms import as_messages, as_tools
from training.data.prediction_rows import RowReader
from training.evaluation.stored_calibration import Calibration
from training.jobs import resources
from training.jobs.program import is_out_of_memory, restore_garbage_collection, run_program
from training.jobs.protocol import Events, Job, TaskSettings
from training.problems import Problem, UserError
from training.recipe.reading_rules import ReadingRules
from training.task_types.generation import BATCH_PROMPTS

if TYPE_CHECKING:
    from training.engine.conversation import Assistant
    from training.engine.predictor import Predictor
    from training.task_types.task_type import TaskType
    from training.tokenization.answer_tokens import AnswerTokens

SOCKET = "serve.socket"
READY = "ready"
BATCH_LETTERS = 600
"""A further batch costs a CPU as much as so many letters of padding."""
TRIM_S = 5.0
"""Between two times at which free memory is returned, in which batches of ever new shapes leave ever more holes."""
RECEIVED_BYTES = 2**20
UNREADABLE = "has tokens that the model does not have, or is refused by its chat template"


class ServeSettings(TaskSettings):
    """The settings of a job of this program."""

    columns: dict[str, str]
    """The rows' names for the columns that the model reads, by the task type's."""
    reading: dict[str, Any] = Field(default_factory=dict)
    """How rows are read: training.recipe.reading_rules.ReadingRules."""
    max_length: int
    """Tokens a row, or of a prompt."""
    batch_size: int
    """Rows in one forward pass."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    calibration: Calibration | None = None


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    id: int
    """Of the request."""


class Predict(_Message):
    """A request for predictions of rows."""

    kind: Literal["predict"] = "predict"
    rows: list[Any]
    prompt: str | None = None
    """Of embeddings: the column of the training data whose prompt is put before the texts."""


class Generate(_Message):
    """A request for an answer to a conversation, or for the continuation of a text."""

    kind: Literal["generate"] = "generate"
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    text: str | None = None
    """In place of messages."""
    max_new_tokens: int | None = None
    stop: list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool = False


class Stop(_Message):
    """The end of a request whose answer nobody reads."""

    kind: Literal["stop"] = "stop"


class Predicted(_Message):
    """The predictions of a request's rows."""

    kind: Literal["predicted"] = "predicted"
    records: list[dict[str, Any] | None]
    """None for a row that has an error."""
    errors: list[str | None]
    tokens: list[int]
    """Of each row, as the model reads it; 0 for a row that has an error."""


class Text(_Message):
    """A part of an answer."""

    kind: Literal["text"] = "text"
    text: str


class FinishedAnswer(_Message):
    """A whole answer."""

    kind: Literal["answered"] = "answered"
    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: str
    """`stop` or `length`."""


class Refused(_Message):
    """The mistakes of a request."""

    kind: Literal["refused"] = "refused"
    problems: list[Problem]


class Failed(_Message):
    """A failure that is not the request's fault."""

    kind: Literal["failed"] = "failed"
    message: str


Asked = Annotated[Predict | Generate | Stop, Field(discriminator="kind")]
Said = Annotated[Predicted | Text | FinishedAnswer | Refused | Failed, Field(discriminator="kind")]
ASKED: TypeAdapter[Predict | Generate | Stop] = TypeAdapter(Asked)
SAID: TypeAdapter[Predicted | Text | FinishedAnswer | Refused | Failed] = TypeAdapter(Said)


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Answers requests until the connection ends."""
    import torch

    from training.engine.predictor import Predictor
    from training.models import loading

    loading.make_deterministic()
    settings = ServeSettings.model_validate(job.settings)
    task_type = task_types.load(settings.task, settings.options)
    predictor = Predictor(
        task_type,
        Path(job.inputs["model"]),
        Path(job.inputs["tokenizer"]),
        settings.max_length,
        batch_rows=settings.batch_size,
        mixed_precision=settings.mixed_precision,
        calibration=settings.calibration,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    with socket_path(job_dir) as path, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1)
        events.write(READY)
        connection, _ = listening.accept()
    restore_garbage_collection()
    on_gpu, dtype = predictor.network.device.type != "cpu", loading.DTYPES[settings.mixed_precision]
    # Weights are cast once for all requests, except on a GPU, whose memory is too small for both.
    with connection, torch.autocast("cpu", dtype, enabled=settings.mixed_precision != "no" and not on_gpu):
        inbox = _Inbox(connection)
        model, trimmed_s = _Model(task_type, predictor, settings, inbox), 0.0
        while waiting := inbox.take(settings.batch_size):
            rows = [one for one in waiting if isinstance(one, Predict)]
            for batch in split_by_length(rows) if rows and not on_gpu else [waiting]:
                model.answer(batch)
            if time.monotonic() > trimmed_s + TRIM_S:
                resources.release_memory()
                trimmed_s = time.monotonic()
    return {}


@contextlib.contextmanager
def socket_path(job_dir: Path) -> Iterator[str]:
    """A path of the job's socket, which is short enough for the kernel however long the folder's is."""
    folder = os.open(job_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


class _Inbox:
    """The requests that wait. They are read between batches, and while answers are generated.

    Not by a thread of its own: it would have to wait for the interpreter, which the model hardly lets go of, and
    batches would be small.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._waiting = connection, deque[Predict | Generate]()
        self._part = list[bytes]()
        """Of a line whose end has not arrived."""
        self._ended = False
        self._stopped: set[int] = set()

    def take(self, most_rows: int) -> list[Predict] | list[Generate]:
        """Waits for a request, and returns it with all that can be in one batch with it; none at the end."""
        self._receive()
        while not (self._waiting or self._ended):
            select.select([self._connection], [], [])
            self._receive()
        if self._ended:
            return []
        first = self._waiting[0]
        if isinstance(first, Predict):
            return self._take_rows(most_rows)
        alike = [one for one in self._waiting if isinstance(one, Generate) and _sampling(one) == _sampling(first)]
        # With a seed an answer must not depend on the answers beside it.
        return self._remove(alike[: BATCH_PROMPTS if first.seed is None else 1])

    def is_stopped(self, request: int) -> bool:
        """Whether nobody reads the answer to this request any more."""
        self._receive()
        return self._ended or request in self._stopped

    def send(self, *messages: _Message) -> None:
        """Sends messages. A connection that has ended is noticed by `take`."""
        with contextlib.suppress(OSError):
            self._connection.sendall(b"".join(message.model_dump_json().encode() + b"\n" for message in messages))

    def forget(self, requests: Iterable[Predict | Generate]) -> None:
        """Forgets which of these, which are answered, were stopped."""
        self._stopped.difference_update(one.id for one in requests)

    def _take_rows(self, most: int) -> list[Predict]:
        found, rows = list[Predict](), 0
        for one in self._waiting:
            if isinstance(one, Predict) and (not found or rows + len(one.rows) <= most):
                found.append(one)
                rows += len(one.rows)
        return self._remove(found)

    def _remove(self, taken: list[Any]) -> list[Any]:
        ids = {one.id for one in taken}
        self._waiting = deque(one for one in self._waiting if one.id not in ids)
        return taken

    def _receive(self) -> None:
        """Reads all that has arrived, without waiting. A server that is killed may leave a part of a line."""
        with contextlib.suppress(BlockingIOError):
            while not self._ended:
                try:
                    received = self._connection.recv(RECEIVED_BYTES, socket.MSG_DONTWAIT)
                except ConnectionError:
                    received = b""
                self._ended = not received
                *lines, rest = received.split(b"\n")
                for line in lines:
                    self._add(b"".join((*self._part, line)))
                    self._part.clear()
                self._part.append(rest)

    def _add(self, line: bytes) -> None:
        message = ASKED.validate_json(line)
        if isinstance(message, Stop):
            self._stopped.add(message.id)
        else:
            self._waiting.append(message)


def _sampling(request: Generate) -> tuple[float | None, float | None, int | None]:
    return request.temperature, request.top_p, request.seed


class _Model:
    """Answers batches of requests."""

    def __init__(self, task_type: TaskType, predictor: Predictor, settings: ServeSettings, inbox: _Inbox) -> None:
        self._task_type, self._predictor, self._settings, self._inbox = task_type, predictor, settings, inbox
        self._reader = RowReader(task_type, settings.columns, rules=ReadingRules.model_validate(settings.reading))
        self._assistant: Assistant | None = None
        if task_type.generates_text and task_type.auto_class == "AutoModelForCausalLM":
            from training.engine import conversation

            self._assistant = conversation.Assistant(predictor, settings.max_length, settings.mixed_precision)

    def answer(self, requests: Sequence[Predict | Generate]) -> None:
        """Answers the requests. If a batch fails, each request is tried alone, so that one does not fail others."""
        wanted = [one for one in requests if not self._inbox.is_stopped(one.id)]
        try:
            if wanted:
                self._answer_batch(wanted)
        except Exception as error:
            again = [one for one in wanted if len(wanted) > 1 and not (isinstance(one, Generate) and one.stream)]
            traceback.print_exc()
            reason = "the memory ran out" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            self._inbox.send(*(Failed(id=one.id, message=reason) for one in wanted if one not in again))
            if "CUDA error" in str(error) and not is_out_of_memory(error):
                raise  # after one of these, CUDA fails at every later call: the program is started anew
            for one in again:
                self.answer([one])
        self._inbox.forget(requests)

    def _answer_batch(self, requests: Sequence[Any]) -> None:
        if isinstance(requests[0], Predict):
            by_names: dict[Any, list[Predict]] = {}
            for one in requests:
                by_names.setdefault((one.prompt, _names(one.rows)), []).append(one)
            for alike in by_names.values():
                self._predict(alike)
        else:
            self._generate(requests)

    def _predict(self, requests: Sequence[Predict]) -> None:
        """Predicts rows that have the same columns and prompt."""
        counts = [len(one.rows) for one in requests]
        try:
            parts = self._reader.read_mappings([row for one in requests for row in one.rows], "the request")
        except UserError as error:
            self._inbox.send(*(Refused(id=one.id, problems=[*error.problems]) for one in requests))
            return
        inputs = [values for part in parts for values in part.inputs]
        usable = [values for values in inputs if values is not None]
        records, counts_of_tokens = self._predictor_with(requests[0].prompt).predict_and_count(
            to_batch(self._task_type, self._settings.columns, usable)
        )
        of_usable, tokens_of_usable = iter(records), iter(counts_of_tokens)
        found: list[dict[str, Any] | None] = [None if values is None else next(of_usable) for values in inputs]
        tokens = [0 if values is None else next(tokens_of_usable) for values in inputs]
        errors = [
            None if error is None else f"{error.description}{error.value}" for part in parts for error in part.errors
        ]
        for place, record in enumerate(found):
            if record == {}:
                found[place], errors[place] = None, UNREADABLE
        start, answers = 0, list[Predicted]()
        for one, count in zip(requests, counts, strict=True):
            stop = start + count
            part = slice(start, stop)
            answers.append(Predicted(id=one.id, records=found[part], errors=errors[part], tokens=tokens[part]))
            start = stop
        self._inbox.send(*answers)

    def _predictor_with(self, prompt: str | None) -> Predictor:
        """The predictor of embeddings with this prompt; None: with that of the options."""
        if prompt is None:
            return self._predictor
        predictor, options = copy.copy(self._predictor), {**self._settings.options, "predicted_prompt": prompt}
        predictor.task_type = task_types.load(self._settings.task, options)
        return predictor

    def _generate(self, requests: Sequence[Generate]) -> None:
        from training.engine.conversation import Request, Sampling

        assert self._assistant is not None
        ready = list[tuple[Generate, Request]]()
        for one in requests:
            try:
                prompt = self._encode(one)
            except UserError as error:
                self._inbox.send(Refused(id=one.id, problems=[*error.problems]))
                continue
            except (TypeError, ValueError, LookupError) as error:  # a value where messages have none
                problem = Problem(kind="data", where="messages", message=f"these are no messages: {error}.")
                self._inbox.send(Refused(id=one.id, problems=[problem]))
                continue
            request = Request(
                prompt,
                one.max_new_tokens,
                one.stop,
                stop_requested=partial(self._inbox.is_stopped, one.id),
                **({"on_text": partial(self._send_text, one.id)} if one.stream else {}),
            )
            ready.append((one, request))
        if not ready:
            return
        sampling = Sampling(requests[0].temperature, requests[0].top_p, requests[0].seed)
        for (one, _), reply in zip(ready, self._assistant.generate([each for _, each in ready], sampling), strict=True):
            self._inbox.send(
                FinishedAnswer(
                    id=one.id,
                    text=reply.text,
                    tokens=reply.tokens,
                    prompt_tokens=reply.prompt_tokens,
                    finish_reason=reply.finish_reason,
                )
            )

    def _send_text(self, request: int, text: str) -> None:
        self._inbox.send(Text(id=request, text=text))

    def _encode(self, request: Generate) -> AnswerTokens:
        """The tokens of a prompt. Raises UserError for one that the model cannot read."""
        assert self._assistant is not None
        if request.messages is not None:
            messages = as_messages([plain_message(message) for message in request.messages])
            tools = as_tools(request.tools or [])
            if problem := find_conversation_problem(messages, tools):
                raise UserError.of("data", "messages", f"{problem}.")
            prompt = self._assistant.encode_messages(messages, tools)
        else:
            prompt = self._assistant.encode_text(request.text or "")
        if len(prompt.ids) > self._assistant.max_length:
            message = f"{len(prompt.ids):,} tokens are given, and the model reads at most "
            message += f"{self._assistant.max_length:,}: shorten the prompt."
            raise UserError.of("context_length", "messages" if request.messages is not None else "prompt", message)
        return prompt


def find_conversation_problem(messages: Any, tools: Any) -> str | None:
    """The first problem of a conversation to answer, in words; None if there is none."""
    from training.tokenization.chat_templates import find_problem, find_tool_problem

    if problem := find_problem(messages, answered=False):
        return f"this is no conversation: {problem}"
    if messages[-1]["role"] == "assistant":
        return "the last message is the assistant's, and there is nothing to answer"
    if problem := find_tool_problem(tools):
        return f"these are no tools: {problem}"
    return None


def split_by_length(requests: Sequence[Predict]) -> list[list[Predict]]:
    """Divides requests into batches of similar lengths, where padding would cost more than a further batch."""
    ordered = sorted(requests, key=_longest)
    cost, starts = [0.0], list[int]()  # of the first n requests, and where the last of their batches begins
    for stop, longest in enumerate(map(_longest, ordered), 1):
        costs = [cost[start] + BATCH_LETTERS + (stop - start) * longest for start in range(stop)]
        starts.append(min(range(stop), key=costs.__getitem__))
        cost.append(costs[starts[-1]])
    batches, stop = list[list[Predict]](), len(ordered)
    while stop:
        batches.append(ordered[starts[stop - 1] : stop])
        stop = starts[stop - 1]
    return batches[::-1]


def _longest(request: Predict) -> int:
    """The letters of the longest row."""
    return max(len(str(row)) for row in request.rows)


def _names(rows: Sequence[Any]) -> Any:
    """The columns of rows if all have the same; otherwise a value that no other request has."""
    names = {frozenset(row) if isinstance(row, dict) else None for row in rows}
    return names.pop() if len(names) == 1 and None not in names else id(rows)


if __name__ == "__main__":
    run_program(main)
