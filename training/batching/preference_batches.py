"""Batches of rows with two texts: of a preference pair, or a labelled completion and a mismatched one.

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

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from training.batching.batches import PadToLongest
from training.batching.causal_batches import PadDocuments
from training.tokenization.packing import OF_ANSWER
from training.tokenization.preference_rows import ANSWER_TOKENS, CHOSEN_LENGTH


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
