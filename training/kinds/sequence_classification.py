"""Sequence classification: one text, or a pair of texts, gets one of the labels.

A row of the data set        {"text": "A gripping film.", "label": 1}
becomes token features       {"input_ids": [101, 1037, ..., 102], "length": 7, "label": 1}
and, padded in a batch,      {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B,)}
the model answers with       logits (B, L), and the prediction is the label of the largest one.

B rows, T tokens (those of the longest row, or a few more), L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.batching import PadToLongest

AUTO_CLASS = "AutoModelForSequenceClassification"
"""The class of transformers that loads and creates this kind's models; a name, for scoring needs no torch."""


def config_fields(labels: Sequence[str]) -> dict[str, Any]:
    """What the model's config says about the labels, given by name in the order of their indices."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


def collator(tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
    """What makes token features into the tensors that the model takes, T a multiple of this."""
    from training.batching import PadToLongest

    return PadToLongest(tokenizer, multiple)


def predictions(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """(N, L) logits to (N,) label indices; the lower index where two are equal."""
    return np.asarray(logits.argmax(axis=-1), dtype=np.int64)


def probabilities(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """(N, L) logits to (N, L) probabilities, each row adding up to one."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))
