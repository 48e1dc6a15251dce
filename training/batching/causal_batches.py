"""Batches of documents for causal language models, and what keeps documents in a row apart.

transformers tells by position_ids which tokens of a row belong together, where a forward pass is given no attention
mask and makes no cache (masking_utils.find_packed_sequence_indices, 5.23). With either of them, and with models that
take no notice of position_ids, such as OPT, BLOOM and Mamba, attention crosses from one document to the next, without a
word. So no cache is made in training, there is no mask, and the model is tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.batching.batches import IGNORED, PadToLongest
from training.problems import Problem, UserError
from training.tokenization.packing import OF_ANSWER, STARTS

FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7]
OTHER_FIRST, OTHER_SECOND = [7, 6, 5, 7], [3, 2, 1]
"""The documents of the trials, in rows of equal length, so that a GPU uses the same kernels and rounding."""
TOLERANCE = 1e-4
"""Relative to the largest logit; rounding is a hundredth of it."""


class PadDocuments(PadToLongest):
    """Token features of B rows to tensors (B, T) int64, T the longest row rounded up to a multiple, filled up on the
    right.

    Gives input_ids; labels, IGNORED where a document begins, where there is no token, and for tokens that are not
    OF_ANSWER, where rows say which are; and of packed rows position_ids. There is no attention mask, for no token sees
    what comes after it. A tokenizer without a pad token fills up with its eos token, or with 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> None:
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.multiple, self.left = multiple, False
        self.fill = {"input_ids": next(token for token in known if token is not None), OF_ANSWER: 0}

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        ids, there = batch["input_ids"], batch["attention_mask"].numpy() == 1
        starts = np.zeros(there.shape, np.bool_)
        for line, row in zip(starts, rows, strict=True):
            line[row.get(STARTS, 0)] = True
            line[len(row["input_ids"]) :][:1] = True  # padding is one more document
        no_target = torch.from_numpy(starts | ~there)
        if OF_ANSWER in batch:
            no_target |= batch[OF_ANSWER] == 0
        inputs = {"input_ids": ids, "labels": ids.masked_fill(no_target, IGNORED)}
        if STARTS in rows[0]:
            places = np.arange(ids.shape[1])
            inputs["position_ids"] = torch.from_numpy(
                places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
            )
        return inputs


def make_no_cache(model: PreTrainedModel) -> None:
    """Turns the cache off in all forward passes. The model's config, which is exported, stays unchanged."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(
    model: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return given, {**named, "use_cache": False}


def require_causal(model: PreTrainedModel) -> None:
    """Raises UserError if a token's logits depend on later tokens."""
    some, others = (_logits(model, FIRST + after)[:, : len(FIRST)] for after in (SECOND, OTHER_SECOND))
    if _differ(some, others):
        message = (
            f"{type(model).__name__} sees the tokens that it shall tell: choose a model that was made to continue "
        )
        message += "texts, or for one of the model types that can be both, such as bert, set is_decoder in its config."
        raise UserError([Problem(kind="model", where="model", message=message)])


def require_apart(model: PreTrainedModel) -> None:
    """Raises UserError if a document's logits depend on the document before it in the same row."""
    places = [*range(len(FIRST)), *range(len(SECOND))]
    some, others = (_logits(model, before + SECOND, places)[:, len(FIRST) :] for before in (FIRST, OTHER_FIRST))
    if _differ(some, others):
        message = f"true packs documents into one row, and attention of {type(model).__name__} crosses from one to the "
        message += "next: set it to false, or choose another model."
        raise UserError([Problem(kind="model", where="options.packing", message=message)])


def _logits(model: PreTrainedModel, ids: Sequence[int], places: Sequence[int] | None = None) -> torch.Tensor:
    """(2, T, V) the logits of the same row twice, because kernels may treat a batch of one differently. They are
    computed on the model's device, which is a GPU for weights in 4 bits."""
    training, size = model.training, model.config.get_text_config().vocab_size
    given = {"input_ids": torch.tensor([ids, ids], device=model.device) % size}
    if places is not None:
        given["position_ids"] = torch.tensor([places, places], device=model.device)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**given).logits
    model.train(training)
    return logits


def _differ(some: torch.Tensor, others: torch.Tensor) -> bool:
    return bool((some - others).abs().max() > TOLERANCE * others.abs().max())
