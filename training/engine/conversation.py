"""Answers of a causal language model, token by token: to conversations by its chat template, and after plain texts.

N prompts of a batch, T tokens of the longest prompt, S tokens of the longest answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from training.models import loading
from training.task_types.generation import (
    AnswerDecoder,
    Generation,
    drop_end_tokens,
    drop_spaces,
    limit_to_positions,
    listed,
    pad_prompts,
    unset_ineffective,
)
from training.tokenization.answer_tokens import AnswerTokens, encode_answers
from training.tokenization.chat_templates import ChatTemplate

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from training.engine.predictor import Predictor
    from training.task_types.causal_lm import CausalLM

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

DECODE_EVERY = 512
"""An answer is decoded after each token, an answer of more tokens than this after every second one, and so on."""
MOST_NEW_TOKENS = 4096
"""The most tokens of an answer by a model without a limit of positions."""


COLDEST = 1e-3
"""Below this temperature the likeliest token is taken: dividing by less would overflow."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Requests of one batch share it. None keeps the settings of the model's recipe."""

    temperature: float | None = None
    """0 takes the likeliest token."""
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Request:
    """A prompt to answer."""

    prompt: AnswerTokens
    max_new_tokens: int | None = None
    """None for that of the model's recipe."""
    stop: Sequence[str] = ()
    """Texts before which the answer ends."""
    on_text: Callable[[str], None] = lambda text: None
    """Receives each part of the answer, in whole words."""
    stop_requested: Callable[[], bool] = lambda: False
    """Asked after each token; the answer ends if it returns True."""


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
    prompt_tokens: int = 0
    finish_reason: str = "stop"
    """`stop`, or `length` for an answer that has as many tokens as it may have."""


class Assistant:
    """A model that answers conversations by its chat template, with the generation settings of its task type.

    Args:
        predictor: with the model, whose task type has the options of text generation.
        max_length: tokens of a prompt.
        mixed_precision: no, bf16 or fp16.
    """

    def __init__(self, predictor: Predictor, max_length: int, mixed_precision: str = "no") -> None:
        self._task_type, self._encoder = predictor.task_type, predictor.encoder
        self._network, self._decoder = predictor.network, AnswerDecoder(predictor.tokenizer)
        chat = self._encoder.chat
        self._template = ChatTemplate(*chat, self._encoder.special_texts) if chat else None
        self._settings = cast(Generation, self._task_type.options).settings_for(self._network)
        self.max_length = limit_to_positions(self._network, self._settings, max_length)
        """The most tokens of a prompt."""
        self._positions = getattr(self._network.config.get_text_config(), "max_position_embeddings", None)
        self._precision = mixed_precision

    def answer(self, messages: Messages, on_text: Callable[[str], None], stop_requested: Callable[[], bool]) -> Reply:
        """Answers the conversation, whose last message is the user's. Its oldest messages are left out if it is longer
        than the model reads.

        `on_text` is called with each part of the answer, in whole words; with several beams once, at the end. After
        each token the answer ends if `stop_requested` returns True. Raises UserError if the chat template fails.
        """
        prompt, dropped = self._shorten(messages)
        (reply,) = self.generate([Request(prompt, on_text=on_text, stop_requested=stop_requested)])
        return replace(reply, dropped=dropped)

    def encode_messages(self, messages: Messages, tools: Tools = ()) -> AnswerTokens:
        """The tokens of a conversation with the start of its answer, by the chat template, which the model must have.
        Raises UserError if the template fails."""
        assert self._template is not None
        text = self._template.render_prompt(messages, tools)
        (prompt,) = encode_answers(self._encoder, [text], [[]], is_text=False, append_eos=False)
        return prompt

    def encode_text(self, text: str) -> AnswerTokens:
        """The tokens of a plain text to continue."""
        if "text" in self._task_type.columns:
            rows = pa.RecordBatch.from_pydict({"text": pa.array([text], pa.string())})
            (prompt,) = cast("CausalLM", self._task_type).prompts(self._encoder, rows, self._settings)
            return prompt
        (prompt,) = encode_answers(self._encoder, [text], [[]], is_text=True, append_eos=False)
        return prompt._replace(ids=drop_end_tokens(prompt.ids, self._settings))

    def most_new_tokens(self, request: Request) -> int:
        """The most tokens of a request's answer: as many as it asks for, if the model has positions for them."""
        wanted = request.max_new_tokens or cast(int, self._settings.max_new_tokens)
        left = MOST_NEW_TOKENS if self._positions is None else self._positions - len(request.prompt.ids)
        return max(1, min(wanted, left))

    def generate(self, requests: Sequence[Request], sampling: Sampling = Sampling()) -> list[Reply]:
        """Answers several prompts, of at most `max_length` tokens each, in as few batches as they fit in."""
        settings, replies = self._settings_by(sampling), list[Reply]()
        batch: list[Request] = []
        for request in requests:
            if batch and not self._fit([*batch, request], settings):
                replies += self._generate_batch(batch, settings, sampling.seed)
                batch = []
            batch.append(request)
        return replies + self._generate_batch(batch, settings, sampling.seed)

    def _fit(self, requests: Sequence[Request], settings: GenerationConfig) -> bool:
        """Whether prompts can be answered together: the longest answer goes on after the longest prompt, and beams that
        may grow longer have other beginnings."""
        most = {self.most_new_tokens(one) for one in requests}
        if settings.num_beams != 1 and len(most) > 1:
            return False
        return self._positions is None or max(len(one.prompt.ids) for one in requests) + max(most) <= self._positions

    def _generate_batch(self, requests: Sequence[Request], settings: GenerationConfig, seed: int | None) -> list[Reply]:
        ids, mask = pad_prompts([one.prompt.ids for one in requests], settings)
        width = ids.shape[1]
        most = [self.most_new_tokens(one) for one in requests]
        settings.update(max_new_tokens=max(most), num_return_sequences=1)
        ends = frozenset(listed(settings.eos_token_id))
        answers = [_Answer(one, n, self._decoder, ends) for one, n in zip(requests, most, strict=True)]
        # Beams change until the end: their tokens are no part of an answer yet.
        follows = _EachToken(answers) if settings.num_beams == 1 else _StopOfAll(answers)
        if seed is not None:
            torch.manual_seed(seed)
        with torch.no_grad(), loading.autocast(self._network.device, self._precision):
            generated = self._network.generate(
                input_ids=torch.from_numpy(ids).to(self._network.device),
                attention_mask=torch.from_numpy(mask).to(self._network.device),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([follows]),
            )  # (N, T + S)
        if seed is not None:
            torch.seed()  # other answers stay random
        if settings.num_beams != 1:
            for answer, tokens in zip(answers, generated[:, width:].tolist(), strict=True):
                for token in tokens:
                    if not answer.finish_reason:
                        answer.add(token, decode=False)
        return [answer.close(tokens) for answer, tokens in zip(answers, mask.sum(axis=1).tolist(), strict=True)]

    def _settings_by(self, sampling: Sampling) -> GenerationConfig:
        settings = deepcopy(self._settings)
        if sampling.temperature is not None and sampling.temperature < COLDEST:
            settings.update(do_sample=False, num_beams=1)
        elif sampling.temperature is not None or (sampling.top_p is not None and sampling.top_p < 1):
            temperature, top_p = sampling.temperature or 1.0, 1.0 if sampling.top_p is None else sampling.top_p
            settings.update(do_sample=True, num_beams=1, temperature=temperature, top_p=top_p, top_k=0)
        unset_ineffective(settings)
        return settings

    def _shorten(self, messages: Messages) -> tuple[AnswerTokens, int]:
        """The tokens of the prompt, and the number of messages that were dropped: the oldest, except a first
        one by the system. A single message that is too long loses its beginning."""
        dropped = 0
        while True:
            prompt = self.encode_messages(messages)
            first = int(messages[0]["role"] == "system")
            if len(prompt.ids) <= self.max_length or len(messages) <= first + 1:
                return prompt._replace(ids=prompt.ids[-self.max_length :]), dropped
            # The next question begins the conversation: templates want user and assistant in turns.
            count = next(
                (n for n, message in enumerate(messages[first + 1 :], 1) if message["role"] == "user"),
                len(messages) - first - 1,
            )
            messages = [*messages[:first], *messages[first + count :]]
            dropped += count


@dataclass
class _Answer:
    """An answer as it grows."""

    request: Request
    most: int
    """The most tokens that it may have."""
    decoder: AnswerDecoder
    ends: frozenset[int]
    """The tokens that end it."""
    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str = ""
    """Empty until it ends."""
    stopped: bool = False
    _text: str = ""
    _written: int = 0
    """Characters that were passed on."""

    def add(self, token: int, *, decode: bool = True) -> None:
        """Adds a token, and passes on the words that are whole."""
        self.tokens += 1
        if token in self.ends:
            self.finish_reason = "stop"
            return
        self.ids.append(token)
        if decode and len(self.ids) % (1 + len(self.ids) // DECODE_EVERY) == 0:
            self._decode()
            self._write(self._whole_words())
        if not self.finish_reason and self.tokens >= self.most:
            self.finish_reason = "length"
        if not self.finish_reason and self.request.stop_requested():
            self.finish_reason, self.stopped = "stop", True

    def close(self, prompt_tokens: int) -> Reply:
        """Passes on the rest, and returns the answer."""
        self._decode()
        self._write(len(self._text))
        reason = self.finish_reason or "length"
        return Reply(self._text, self.tokens, 0, self.stopped, prompt_tokens, reason)

    def _decode(self) -> None:
        self._text = drop_spaces(self.decoder(self.ids), self.request.prompt.spaces)
        places = [place for stop in self.request.stop if (place := self._text.find(stop)) >= 0]
        if places:
            self._text, self.finish_reason = self._text[: min(places)], "stop"

    def _whole_words(self) -> int:
        """The characters that no further token changes, and that begin none of the texts before which it ends."""
        last = self._text[-1:]
        whole = len(self._text) if last == "\n" or _is_ideograph(last) else self._text.rfind(" ") + 1
        longest = max(map(len, self.request.stop), default=1)
        return min(whole, len(self._text) - longest + 1)

    def _write(self, end: int) -> None:
        if end > self._written:
            self.request.on_text(self._text[self._written : end])
            self._written = end


def _is_ideograph(letter: str) -> bool:
    """Whether a letter is of a script without spaces between words."""
    return "\u3040" <= letter <= "\u30ff" or "\u3400" <= letter <= "\u9fff" or "\U00020000" <= letter <= "\U0002fa1f"


class _EachToken(StoppingCriteria):
    """Follows each answer of a batch, and ends it alone."""

    def __init__(self, answers: Sequence[_Answer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        for answer, token in zip(self._answers, input_ids[:, -1].tolist(), strict=True):
            if not answer.finish_reason:
                answer.add(token)
        return torch.tensor([bool(answer.finish_reason) for answer in self._answers], device=input_ids.device)


class _StopOfAll(StoppingCriteria):
    """Ends a batch when all of its answers are to stop."""

    def __init__(self, answers: Sequence[_Answer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        for answer in self._answers:
            answer.stopped = answer.stopped or answer.request.stop_requested()
        return torch.full((len(input_ids),), all(answer.stopped for answer in self._answers), device=input_ids.device)
