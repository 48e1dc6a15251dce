"""A conversation with a registered assistant, whose model runs in one child program."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tasks.jobs.commands import python_argv
from tasks.jobs.launch import EventReader, follow_job, require_finished
from tasks.registry.model_spec import ModelSpec
from tasks.registry.pinned_versions import find_folders_for_job
from training import task_types
from training.jobs.protocol import EVENTS, Events, Job
from training.models.repository_files import chat_template
from training.problems import UserError, relocated
from training.programs.chat import ANSWERED, QUESTION, READY, STOP, TEXT, TURNS, ChatSettings
from training.tokenization.tool_calls import parse_message

PROGRAM = "training.programs.chat"
POLL_S = 0.02
NEVER_STALLED_S = float("inf")
"""A person may think for hours between two questions."""

Message = dict[str, str]


def require_assistant(model: ModelSpec, max_new_tokens: int | None) -> ModelSpec:
    """The model with this limit of an answer's tokens, or with its own. Raises UserError for a model that generates no
    text after a text, and for a limit that its options do not allow."""
    name, task, options = f"{model.name} version {model.version}", model.task["task"], dict(model.task["options"])
    if not can_talk(task):
        talking = ", ".join(filter(can_talk, task_types.TASK_TYPES))
        message = f"{name} is a model for the task type {task}, which holds no conversation: choose one for {talking}, "
        raise UserError.of("option", "NAME", f"{message}or ask it by `finetune predict`.")
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    where = "--max-new-tokens"
    with relocated(where):
        most = cast(Any, task_types.load(task, options).options).max_new_tokens
    if not most:
        message = f"with 0 {name} generates nothing: give the most tokens of an answer, such as 128."
        raise UserError.of("option", where, message)
    return replace(model, task={"task": task, "options": options})


def can_talk(task: str) -> bool:
    """Whether models of the task type continue a text with new text."""
    task_type = task_types.class_of(task)
    return task_type.auto_class == "AutoModelForCausalLM" and task_type.generates_text


@contextmanager
def open_chat(model: ModelSpec, system: str) -> Iterator[Chat]:
    """A conversation, whose program runs until the end of the block.

    Args:
        model: the version that answers, as `require_assistant` returns it.
        system: the first message of each conversation; none if it is empty.

    Raises UserError for a model without a chat template, and JobFailed if the program ends before it has loaded the
    model.
    """
    with find_folders_for_job("chat", model.pinned) as (work, folders):
        if chat_template(folders["tokenizer"]) is None:
            message = f"the tokenizer of {model.name} version {model.version} has no chat template, so it continues "
            message += "texts and holds no conversation: ask it by `finetune predict`, or train it with "
            message += "model.chat_template."
            raise UserError.of("option", "NAME", message)
        settings = ChatSettings(**model.task, max_length=model.max_length, mixed_precision=model.mixed_precision)
        inputs = {name: str(path) for name, path in folders.items()}
        Job(program=PROGRAM, key=work.key, settings=settings.model_dump(), inputs=inputs).write(work.job)
        with Chat(work.job, system) as chat:
            yield chat


class Chat:
    """A conversation with the program of a job.

    Args:
        job: its folder.
        system: the first message of each conversation; none if it is empty.
    """

    def __init__(self, job: Path, system: str) -> None:
        self.dropped = 0
        """The oldest messages that the model did not read for its last answer."""
        self._system = system
        self._events: list[Any] = []
        self._turns, self._number = Events(job / TURNS), 0
        self._looks = follow_job(
            job,
            python_argv(PROGRAM),
            events=EventReader(job / EVENTS, self._events.extend),
            stall_timeout_s=NEVER_STALLED_S,
            poll_s=POLL_S,
        )
        self.reset()

    def __enter__(self) -> Chat:
        """Waits until the program has loaded the model."""
        try:
            while not any(event["kind"] == READY for event in self._look()):
                pass
        except BaseException:
            self._looks.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._looks.close()

    def reset(self) -> None:
        """Begins a new conversation."""
        self._messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []

    def answer(self, question: str) -> Iterator[str]:
        """The parts of the answer, as they come. SIGINT ends the answer, which stays part of the conversation; a second
        one raises KeyboardInterrupt. Raises JobFailed or UserError if the program ends."""
        self._number += 1
        messages = [*self._messages, {"role": "user", "content": question}]
        self._turns.write(QUESTION, number=self._number, messages=messages)
        answered: dict[str, Any] | None = None
        with _interrupts(lambda: self._turns.write(STOP, number=self._number)):
            while answered is None:
                for event in self._look():
                    if event["kind"] == TEXT:
                        yield event["text"]
                    elif event["kind"] == ANSWERED:
                        answered = event
        self.dropped = answered["dropped"]
        message = parse_message(answered["text"])
        if message["content"].strip():  # an empty answer is no message that templates accept
            self._messages = [*messages, message]

    def _look(self) -> Sequence[dict[str, Any]]:
        """Looks at the program once, and returns its new events."""
        try:
            next(self._looks)
        except StopIteration as ended:
            require_finished(ended.value)
        events = [*self._events]
        self._events.clear()
        return events


@contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, the first SIGINT calls `stop`, and the second raises KeyboardInterrupt."""
    count = 0

    def on_signal(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        stop()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
