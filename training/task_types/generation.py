"""Text generation: the recipe's options, a model's settings, and the continuations of prompts.

N prompts, T tokens of the longest, S tokens of the longest continuation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from training.models.repository_files import read_json
from training.recipe.field_types import ClosedModel
from training.tokenization.tool_calls import MARKS

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    Ids = npt.NDArray[np.int32]

FILE = "generation_config.json"
BATCH_PROMPTS = 16
"""The most answers that are generated at once."""
# transformers refuses to save these settings if others make them ineffective.
_OF_SAMPLING = ("temperature", "top_p", "min_p", "top_h", "typical_p", "top_k", "epsilon_cutoff", "eta_cutoff")
_OF_BEAMS = ("early_stopping", "length_penalty")


class Generation(ClosedModel):
    """The options of text generation, which is deterministic: nothing is sampled."""

    num_beams: int = Field(default=1, ge=1)
    """The number of beams; 1 always takes the likeliest token (greedy search)."""
    max_new_tokens: int = Field(default=128, ge=1)
    """The most tokens that are generated."""
    min_new_tokens: int | None = Field(default=None, ge=0)
    """The fewest tokens that are generated. Null, here and below, keeps the model's own setting."""
    length_penalty: float | None = None
    """With beams: values above 0 favour long texts, below 0 short texts."""
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    """The length of token sequences that are not generated twice; 0 for no limit."""

    @field_validator("min_new_tokens")
    @classmethod
    def _fits(cls, least: int | None, others: ValidationInfo) -> int | None:
        most = others.data.get("max_new_tokens")
        if least is not None and most is not None and least > most:
            raise PydanticCustomError("limits", "more than options.max_new_tokens, {most}", vars())
        return least

    @field_validator("length_penalty")
    @classmethod
    def _has_beams(cls, penalty: float | None, others: ValidationInfo) -> float | None:
        if penalty is not None and others.data.get("num_beams") == 1:
            raise PydanticCustomError("beams", "does nothing without beams: set options.num_beams to more than 1")
        return penalty

    def settings(self) -> dict[str, Any]:
        """The options that are set, under the names of GenerationConfig."""
        options = self.model_dump(include=set(Generation.model_fields), exclude_none=True)
        return {"do_sample": False, "max_length": None, "num_return_sequences": 1, **options}

    def settings_for(self, model: PreTrainedModel) -> GenerationConfig:
        """The model's own settings, overridden by the options."""
        settings: GenerationConfig = deepcopy(model.generation_config)
        settings.update(**self.settings())
        unset_ineffective(settings)
        return settings

    def published_files(self, folder: Path) -> dict[str, str]:
        """generation_config.json of the exported model, with the options."""
        settings = {**read_json(folder / FILE), **self.settings()}
        ineffective = _ineffective(settings)
        kept = {name: value for name, value in settings.items() if value is not None and name not in ineffective}
        return {FILE: json.dumps(kept, indent=2, sort_keys=True) + "\n"}


def unset_ineffective(settings: GenerationConfig) -> None:
    """Unsets settings without effect. Many models have some, and transformers refuses to save them."""
    settings.update(**dict.fromkeys(_ineffective(settings.to_dict())))


def _ineffective(settings: Mapping[str, Any]) -> tuple[str, ...]:
    sampling = () if settings.get("do_sample") is True else _OF_SAMPLING
    return sampling + (() if (settings.get("num_beams") or 1) > 1 else _OF_BEAMS)


def set_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets bos, eos and pad in the model's config and generation settings to those of the tokenizer; if it has no bos
    or eos, as BERT's, to cls and sep. Other tokens that end the model's texts are kept."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begin, end = tokenizer.cls_token_id if bos is None else bos, tokenizer.sep_token_id if eos is None else eos
    vocabulary = model.config.get_text_config().vocab_size
    for settings in (model.config, model.generation_config):
        known = [token for token in listed(settings.eos_token_id) if token < vocabulary]
        ends = [*([] if end is None else [end]), *(token for token in known if token != end)]
        settings.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
        if begin is not None or any(token >= vocabulary for token in listed(settings.bos_token_id)):
            settings.bos_token_id = begin
        if settings.pad_token_id is None:
            settings.pad_token_id = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    unset_ineffective(model.generation_config)


def add_end_token(model: PreTrainedModel, token: int) -> None:
    """Adds a token to the end tokens of the model."""
    for settings in (model.config, model.generation_config):
        if token not in (known := listed(settings.eos_token_id)):
            settings.eos_token_id = [*known, token] if known else token


def drop_end_tokens(text: Ids, settings: GenerationConfig) -> Ids:
    """The tokens of a text without trailing end tokens, so that it can be continued."""
    ends = listed(settings.eos_token_id)
    while len(text) and text[-1] in ends:
        text = text[:-1]
    return text


def drop_spaces(text: str, spaces: str) -> str:
    """An answer's text without the spaces that its prompt ends with."""
    while spaces and text[:1] == spaces[0]:
        text, spaces = text[1:], spaces[1:]
    return text


class AnswerDecoder:
    """Decodes the tokens of answers. Of special tokens, only the marks of tool calls and reasoning become text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder
        self._tokenizer = tokenizer
        self._marks = {token for token, one in added.items() if one.special and one.content in MARKS}
        self._left_out = {token for token, one in added.items() if one.special} - self._marks

    def __call__(self, tokens: Sequence[int]) -> str:
        if self._marks.isdisjoint(tokens):
            return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        return str(self._tokenizer.decode([token for token in tokens if token not in self._left_out]))


class ContinuedPrompt(NamedTuple):
    """The text that a model generates after a prompt."""

    text: str
    """As AnswerDecoder decodes it."""
    tokens: int
    """Of the text, with the one that ends it."""
    prompt_tokens: int
    """Of the prompt that the model reads."""
    ended: bool
    """Whether the model ended the text. If not, it has as many tokens as it may have."""

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`, as OpenAI's API has them."""
        return "stop" if self.ended else "length"


def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Ids],
    settings: GenerationConfig,
    max_length: int,
) -> list[ContinuedPrompt]:
    """The text that a causal model generates after each prompt.

    A prompt is cut to its last `max_length` tokens, or fewer if the model lacks positions for the continuation; an
    empty one is that of `pad_prompts`.
    """
    import torch

    max_length = limit_to_positions(model, settings, max_length)
    decode = AnswerDecoder(tokenizer)
    answers: list[ContinuedPrompt] = []
    for start in range(0, len(prompts), BATCH_PROMPTS):
        batch = [prompt[-max_length:] for prompt in prompts[start : start + BATCH_PROMPTS]]
        ids, mask = pad_prompts(batch, settings)
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        with torch.inference_mode():
            generated = model.generate(
                **{name: tensor.to(model.device) for name, tensor in inputs.items()}, generation_config=settings
            )  # (N, T + S)
        new = generated[:, ids.shape[1] :]
        texts = map(decode, new.tolist())
        is_end = np.isin(new.cpu().numpy(), listed(settings.eos_token_id))  # (N, S)
        ended: Any = is_end.any(axis=1)  # (N,)
        tokens = np.where(ended, is_end.argmax(axis=1) + 1, new.shape[1])
        found = zip(texts, tokens.tolist(), mask.sum(axis=1).tolist(), ended.tolist(), strict=True)
        answers += [ContinuedPrompt(*one) for one in found]
    return answers


def pad_prompts(
    prompts: Sequence[Ids], settings: GenerationConfig
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pads N prompts on the left to T tokens, the longest. Returns the tokens (N, T), and a mask (N, T) that is 1 for a
    prompt's own tokens and 0 for padding. An empty prompt becomes the bos token, or else an eos token."""
    begin = next(iter((*listed(settings.bos_token_id), *listed(settings.eos_token_id))), 0)
    rows = [prompt if len(prompt) else np.array([begin], np.int32) for prompt in prompts]
    width = max(map(len, rows))
    ids = np.full((len(rows), width), settings.pad_token_id or 0, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for row_ids, row_mask, row in zip(ids, mask, rows, strict=True):
        row_ids[width - len(row) :], row_mask[width - len(row) :] = row, 1
    return ids, mask


def limit_to_positions(model: PreTrainedModel, settings: GenerationConfig, max_length: int) -> int:
    """The most tokens of a prompt, at most `max_length`, that leave positions for the new tokens. Lowers
    `settings.max_new_tokens` if the model has fewer positions."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return max_length
    settings.max_new_tokens = min(settings.max_new_tokens, positions - 1)
    return min(max_length, positions - settings.max_new_tokens)


def listed(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else tokens if isinstance(tokens, list) else [tokens]
