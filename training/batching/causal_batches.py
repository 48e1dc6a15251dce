"""Batches for causal language models: documents, and rows with two texts; and checks that attention does not cross
documents.

Without an attention mask and without a cache, transformers finds the documents of a row by position_ids
(masking_utils.find_packed_sequence_indices, 5.23). With either of them, and with models that ignore position_ids, such
as OPT, BLOOM and Mamba, attention silently crosses documents. So training uses neither, and the model is tested.

The two texts are those of a preference pair, or those of a labelled completion and a mismatched one.

token features of a pair     {"input_ids": [5, 9, 4, 2, 5, 9, 8, 6, 2], "of_answer": [0, 0, 1, 1, 0, 0, 1, 1, 1],
                              "chosen_length": 4, "chosen_tokens": 2, "rejected_tokens": 3, "length": 9, "targets": 1}
of a labelled completion        training/tokenization/completion_rows.py
a batch of PadTwoTexts       {"input_ids": (2B, T), "targets": (2B, T), "labels": (B, F)}: F is 3 for pairs, 2 for
                              completions, and 2 more with a reference
a batch of PadPairTexts      {"input_ids": (2B, T), "attention_mask": (2B, T), "labels": (B, 2), or (B, 3) with margins}

`input_ids` of a pair are the chosen text, which is the prompt with the chosen answer, and then the rejected text.
`chosen_tokens` and `rejected_tokens` are the tokens of the answers alone. A pair has one target, and none if max_length
leaves no token of an answer.

B rows of a batch, T tokens of the longest text, F facts of a row.
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
from training.tokenization.preference_rows import ANSWER_TOKENS, CHOSEN_LENGTH

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


class PadTwoTexts(PadDocuments):
    """Token features of B rows of two texts to tensors: input_ids (2B, T), the first texts first, padded on the right;
    targets (2B, T), the ids of answers' tokens, IGNORED for others; labels (B, F) float32, those of `facts` that the
    rows have. The column `first_length` has the number of tokens of the first text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, multiple: int, first_length: str, facts: Sequence[str]
    ) -> None:
        super().__init__(tokenizer, multiple)
        self._first_length, self._facts = first_length, facts

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(cut_texts(rows, self._first_length))
        return {"input_ids": batch["input_ids"], "targets": batch["labels"], "labels": facts_of(rows, self._facts)}


class PadPairTexts(PadToLongest):
    """Token features of B pairs to tensors: input_ids and attention_mask (2B, T), the chosen texts first; labels (B, 2)
    float32, the ANSWER_TOKENS, or (B, 3) if the rows have a `margin`."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(cut_texts(rows, CHOSEN_LENGTH))
        return {**batch, "labels": facts_of(rows, (*ANSWER_TOKENS, "margin"))}


def facts_of(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> torch.Tensor:
    """(B, F) float32: the columns of these names that the rows have."""
    return torch.from_numpy(np.array([[row[name] for name in names if name in row] for row in rows], np.float32))


def cut_texts(rows: Sequence[dict[str, Any]], first_length: str) -> list[dict[str, Any]]:
    """The first texts of all rows, then the second ones. The column `first_length` has the tokens of the first."""
    first = [_cut(row, 0, row[first_length]) for row in rows]
    return first + [_cut(row, row[first_length], len(row["input_ids"])) for row in rows]


def _cut(row: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: row[name][start:stop] for name in ("input_ids", OF_ANSWER)}
