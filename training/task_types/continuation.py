"""Texts that a causal language model goes on with.

N prompts, T tokens of the longest, S tokens of the longest continuation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from training.task_types.generation import leave_out_effectless

Ids = npt.NDArray[np.int32]
BATCH_PROMPTS = 16


def know_edges(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Has the model's settings say by which tokens this tokenizer begins and ends texts, and fills up: bos, eos and
    pad; for one that has no bos or eos, as BERT's, cls and sep. Other tokens that end its texts stay."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begin, end = tokenizer.cls_token_id if bos is None else bos, tokenizer.sep_token_id if eos is None else eos
    vocabulary = model.config.get_text_config().vocab_size
    for settings in (model.config, model.generation_config):
        known = [token for token in _listed(settings.eos_token_id) if token < vocabulary]
        ends = [*([] if end is None else [end]), *(token for token in known if token != end)]
        settings.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
        if begin is not None or (settings.bos_token_id or 0) >= vocabulary:
            settings.bos_token_id = begin
        if settings.pad_token_id is None:
            settings.pad_token_id = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    leave_out_effectless(model.generation_config)


def know_end(model: PreTrainedModel, token: int) -> None:
    """Has the model's settings say that this token, too, ends what it writes."""
    for settings in (model.config, model.generation_config):
        if token not in (known := _listed(settings.eos_token_id)):
            settings.eos_token_id = [*known, token] if known else token


def _listed(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else tokens if isinstance(tokens, list) else [tokens]


def continued(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Ids],
    settings: GenerationConfig,
    max_length: int,
) -> list[str]:
    """What the model writes behind each of them, without special tokens.

    Of a prompt the last `max_length` tokens count, and fewer where the model has no places for what follows. An empty
    one begins with the token that begins texts, or ends them. The settings say which tokens these are: `know_edges`.
    """
    edges = (settings.bos_token_id, *_listed(settings.eos_token_id))
    begin = next((token for token in edges if token is not None), 0)
    fill = settings.pad_token_id or 0
    places = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if places is not None:
        settings.max_new_tokens = min(settings.max_new_tokens, places - 1)
        max_length = min(max_length, places - settings.max_new_tokens)
    texts: list[str] = []
    for start in range(0, len(prompts), BATCH_PROMPTS):
        asked = prompts[start : start + BATCH_PROMPTS]
        rows = [prompt[-max_length:] if len(prompt) else np.array([begin], np.int32) for prompt in asked]
        width = max(map(len, rows))
        ids, there = np.full((len(rows), width), fill, np.int64), np.zeros((len(rows), width), np.int64)
        for line, mask, row in zip(ids, there, rows, strict=True):  # filled up on the left, where nothing follows
            line[width - len(row) :], mask[width - len(row) :] = row, 1
        given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(there)}
        with torch.inference_mode():
            written = model.generate(
                **{name: tensor.to(model.device) for name, tensor in given.items()}, generation_config=settings
            )
        texts += tokenizer.batch_decode(written[:, width:], skip_special_tokens=True)
    return texts


def opened(text: Ids, ends: GenerationConfig) -> Ids:
    """The tokens of a text without those at its end that end texts: what may go on."""
    last = len(text)
    while last and text[last - 1] in _listed(ends.eos_token_id):
        last -= 1
    return text[:last]
