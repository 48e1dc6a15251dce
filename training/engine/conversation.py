"""Answers of an assistant, token by token: a causal language model with a chat template.

T tokens of a prompt, S tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from training.models import loading
from training.task_types.generation import Generation, drop_spaces, limit_to_positions
from training.tokenization.answer_tokens import AnswerTokens, encode_answers
from training.tokenization.chat_templates import ChatTemplate
from training.tokenization.transformers_encoder import load_encoder

if TYPE_CHECKING:
    from training.task_types.task_type import TaskType

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Reply:
    """An answer, and how much of the conversation the model read for it."""

    text: str
    tokens: int
    """Of the answer, end tokens included."""
    dropped: int
    """The oldest messages that were left out, because the conversation is longer than the model reads."""
    stopped: bool
    """Whether it was stopped on request."""


class Assistant:
    """A model that answers conversations by its chat template, with the generation settings of its task type.

    Args:
        task_type: of the model; its options are those of text generation.
        folder: of its weights.
        tokenizer: the folder of its tokenizer, which has a chat template.
        max_length: tokens of a prompt.
        mixed_precision: no, bf16 or fp16.
        device: where the model computes.
    """

    def __init__(
        self,
        task_type: TaskType,
        folder: Path,
        tokenizer: Path,
        max_length: int,
        *,
        mixed_precision: str = "no",
        device: str | torch.device = "cpu",
    ) -> None:
        self._encoder = load_encoder(tokenizer, folder, max_length)
        self._tokenizer = loading.load_tokenizer(tokenizer, folder)
        assert self._encoder.chat is not None
        self._template = ChatTemplate(*self._encoder.chat, self._encoder.special_texts)
        self._network = loading.load_trained(task_type, folder).to(device)
        self._settings = cast(Generation, task_type.options).settings_for(self._network)
        self._max_length = limit_to_positions(self._network, self._settings, max_length)
        self._autocast = (self._network.device.type, loading.DTYPES[mixed_precision], mixed_precision != "no")

    def answer(self, messages: Messages, on_text: Callable[[str], None], stop_requested: Callable[[], bool]) -> Reply:
        """Answers the conversation, whose last message is the user's.

        `on_text` is called with each part of the answer, in whole words; with several beams once, at the end. After
        each token the answer ends if `stop_requested` returns True. Raises UserError if the chat template fails.
        """
        prompt, dropped = self._encode(messages)
        reader = _Reader(self._tokenizer, prompt.spaces, on_text)
        check = _StopRequested(stop_requested)
        ids = torch.from_numpy(prompt.ids[None].astype(np.int64)).to(self._network.device)  # (1, T)
        kind, dtype, enabled = self._autocast
        with torch.inference_mode(), torch.autocast(kind, dtype, enabled=enabled):
            generated = self._network.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._settings,
                stopping_criteria=StoppingCriteriaList([check]),
                # transformers cannot stream beams, which change until the end.
                **({"streamer": reader} if self._settings.num_beams == 1 else {}),
            )  # (1, T + S)
        answer = generated[0, ids.shape[1] :]
        text = drop_spaces(str(self._tokenizer.decode(answer, skip_special_tokens=True)), prompt.spaces)
        if self._settings.num_beams != 1:
            on_text(text)
        return Reply(text, len(answer), dropped, check.stopped)

    def _encode(self, messages: Messages) -> tuple[AnswerTokens, int]:
        """The tokens of the prompt, and the number of messages that were dropped: the oldest, except a first
        one by the system. A single message that is too long loses its beginning."""
        dropped = 0
        while True:
            text = self._template.render_prompt(messages)
            (prompt,) = encode_answers(self._encoder, [text], [[]], is_text=False, append_eos=False)
            first = int(messages[0]["role"] == "system")
            if len(prompt.ids) <= self._max_length or len(messages) <= first + 1:
                return prompt._replace(ids=prompt.ids[-self._max_length :]), dropped
            # The next question begins the conversation: templates want user and assistant in turns.
            count = next(
                (n for n, message in enumerate(messages[first + 1 :], 1) if message["role"] == "user"),
                len(messages) - first - 1,
            )
            messages = [*messages[:first], *messages[first + count :]]
            dropped += count


class _Reader(TextStreamer):
    """Passes on the text of an answer, without the spaces at the end of its prompt."""

    def __init__(self, tokenizer: Any, spaces: str, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._spaces, self._on_text = spaces, on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        rest = drop_spaces(text, self._spaces)
        self._spaces = "" if rest else self._spaces[len(text) :]
        if rest:
            self._on_text(rest)


class _StopRequested(StoppingCriteria):
    """Ends an answer on request."""

    def __init__(self, requested: Callable[[], bool]) -> None:
        self._requested, self.stopped = requested, False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.stopped = self.stopped or self._requested()
        return torch.full((len(input_ids),), self.stopped, device=input_ids.device)
