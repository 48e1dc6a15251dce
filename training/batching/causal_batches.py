"""Batches of documents for causal language models, and checks that attention does not cross documents.

Without an attention mask and without a cache, transformers finds the documents of a row by position_ids
(masking_utils.find_packed_sequence_indices, 5.23). With either of them, and with models that ignore position_ids, such
as OPT, BLOOM and Mamba, attention silently crosses documents. So training uses neither, and the model is tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.batching.batches import IGNORED, PadToLongest
from training.problems import UserError
from training.tokenization.packing import OF_ANSWER, STARTS

FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7]
OTHER_FIRST, OTHER_SECOND = [7, 6, 5, 7], [3, 2, 1]
"""The documents of the tests, in rows of equal length, so that a GPU uses the same kernels and rounding."""
TOLERANCE = 1e-4
"""Relative to the largest logit; rounding errors are a hundredth of it."""


class PadDocuments(PadToLongest):
    """Token features of B rows to tensors (B, T) int64, padded on the right to a multiple of the longest row.

    Returns input_ids; labels, IGNORED for first tokens of documents, for padding, and for tokens that are not
    OF_ANSWER, if rows have that column; and position_ids for packed rows. No attention mask is needed, because no token
    attends to later ones. The padding is the pad token, or else the eos token, or else 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> None:
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.multiple, self.left = multiple, False
        self.fill = {"input_ids": next(token for token in known if token is not None), OF_ANSWER: 0}

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        ids, is_token = batch["input_ids"], batch["attention_mask"].numpy() == 1
        starts = np.zeros(is_token.shape, np.bool_)
        for line, row in zip(starts, rows, strict=True):
            line[row.get(STARTS, 0)] = True
            line[len(row["input_ids"]) :][:1] = True  # padding is a document too
        no_target = torch.from_numpy(starts | ~is_token)
        if OF_ANSWER in batch:
            no_target |= batch[OF_ANSWER] == 0
        inputs = {"input_ids": ids, "labels": ids.masked_fill(no_target, IGNORED)}
        if STARTS in rows[0]:
            places = np.arange(ids.shape[1])
            inputs["position_ids"] = torch.from_numpy(
                places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
            )
        return inputs


def disable_cache(model: PreTrainedModel) -> None:
    """Turns the cache off in all forward passes. The model's config, which is exported, stays unchanged."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(
            lambda _, args, options: (args, {**options, "use_cache": False}), with_kwargs=True
        )


def require_causal(model: PreTrainedModel) -> None:
    """Raises UserError if a token's logits depend on later tokens."""
    logits, others = (_logits(model, FIRST + after)[:, : len(FIRST)] for after in (SECOND, OTHER_SECOND))
    if _differ(logits, others):
        message = (
            f"{type(model).__name__} attends to later tokens: choose a causal language model, or for model types that "
            "can be both, such as bert, set is_decoder in the model's config."
        )
        raise UserError.of("model", "model", message)


def require_separate_documents(model: PreTrainedModel) -> None:
    """Raises UserError if a document's logits depend on the document before it in the same row."""
    positions = [*range(len(FIRST)), *range(len(SECOND))]
    logits, others = (_logits(model, before + SECOND, positions)[:, len(FIRST) :] for before in (FIRST, OTHER_FIRST))
    if _differ(logits, others):
        message = f"true packs documents into one row, and attention of {type(model).__name__} crosses from one to the "
        message += "next: set it to false, or choose another model."
        raise UserError.of("model", "options.packing", message)


def _logits(model: PreTrainedModel, ids: Sequence[int], positions: Sequence[int] | None = None) -> torch.Tensor:
    """(2, T, V) the logits of the same row twice, because kernels may treat a batch of one differently."""
    is_training, size = model.training, model.config.get_text_config().vocab_size
    inputs = {"input_ids": torch.tensor([ids, ids], device=model.device) % size}
    if positions is not None:
        inputs["position_ids"] = torch.tensor([positions, positions], device=model.device)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**inputs).logits
    model.train(is_training)
    return logits


def _differ(logits: torch.Tensor, others: torch.Tensor) -> bool:
    return bool((logits - others).abs().max() > TOLERANCE * others.abs().max())
