"""Batches of rated completions: a prompt with its completion, and with a mismatched one.

token features of a row      training/tokenization/completion_rows.py
a batch                      {"input_ids": (2B, T), "targets": (2B, T), "labels": (B, 2), or (B, 4) with a reference}

B rows of a batch, T tokens of the longest text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from training.batching.causal_batches import PadDocuments
from training.batching.preference_pairs import cut_texts, facts_of
from training.tokenization.completion_rows import FACTS, TEXT_LENGTH


class PadCompletions(PadDocuments):
    """Token features of B completions to tensors: input_ids (2B, T), the rows' own texts first, then the mismatched
    ones; targets (2B, T), the ids of completions' tokens, IGNORED for others; labels (B, F) float32, the FACTS that the
    rows have."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(cut_texts(rows, TEXT_LENGTH))
        return {"input_ids": batch["input_ids"], "targets": batch["labels"], "labels": facts_of(rows, FACTS)}
