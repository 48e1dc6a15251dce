"""The program that answers in a conversation: `python -m training.programs.chat JOB`.

inputs     model, tokenizer (folders, which may be one)
settings   ChatSettings, below
turns      turns.jsonl in the job's folder, written like events.jsonl by the process that asks:
           `question` with its number and the messages so far; `stop` with the number of the question
events     `ready`; for each question, with its number, `text` for each part of the answer, and `answered` with the
           fields of training.engine.conversation.Reply
output     none

It ends when its supervisor stops it.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from training import task_types
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job, TaskSettings, read_events

TURNS = "turns.jsonl"
QUESTION, STOP = "question", "stop"
READY, TEXT, ANSWERED = "ready", "text", "answered"
POLL_S = 0.02


class ChatSettings(TaskSettings):
    """The settings of a job of this program."""

    max_length: int
    """Tokens of a prompt."""
    mixed_precision: Literal["no", "bf16", "fp16"]


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Answers questions until the program is stopped."""
    import torch

    from training.engine.conversation import Assistant
    from training.engine.predictor import Predictor
    from training.models import loading

    loading.make_deterministic()
    settings = ChatSettings.model_validate(job.settings)
    predictor = Predictor(
        task_types.load(settings.task, settings.options),
        Path(job.inputs["model"]),
        Path(job.inputs["tokenizer"]),
        settings.max_length,
        mixed_precision=settings.mixed_precision,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    assistant = Assistant(predictor, settings.max_length, settings.mixed_precision)
    turns = _Turns(job_dir / TURNS)
    events.write(READY)
    while True:
        number, messages = turns.wait_for_question()
        on_text, stop_requested = partial(_report, events, number), partial(turns.is_stopped, number)
        answer = assistant.answer(messages, on_text, stop_requested)
        events.write(ANSWERED, number=number, **asdict(answer))


def _report(events: Events, number: int, text: str) -> None:
    events.write(TEXT, number=number, text=text)


class _Turns:
    """Reads turns.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._questions: list[tuple[int, list[dict[str, str]]]] = []
        self._stopped: set[int] = set()

    def wait_for_question(self) -> tuple[int, list[dict[str, str]]]:
        """The next question's number and messages."""
        while not self._questions:
            time.sleep(POLL_S)
            self._read()
        return self._questions.pop(0)

    def is_stopped(self, number: int) -> bool:
        """Whether the answer to this question is to end."""
        self._read()
        return number in self._stopped

    def _read(self) -> None:
        turns, self._offset = read_events(self._path, self._offset)
        for turn in turns:
            if turn["kind"] == QUESTION:
                self._questions.append((turn["number"], turn["messages"]))
            elif turn["kind"] == STOP:
                self._stopped.add(turn["number"])


if __name__ == "__main__":
    run_program(main)
