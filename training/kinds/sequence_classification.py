"""Sequence classification: one text, or a pair of texts, gets one of the labels.

A row of the data set        {"text": "A gripping film.", "label": 1}
becomes token features       {"input_ids": [101, 1037, ..., 102], "length": 7, "label": 1}
and, padded in a batch,      {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B,)}
the model answers with       logits (B, L), and the prediction is the label of the largest one.

B rows, T tokens (those of the longest row, or a few more), L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from training.kinds.base import Column, Kind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

    from training.batching import PadToLongest


class SequenceClassification(Kind):
    """One of the labels a row."""

    auto_class = "AutoModelForSequenceClassification"
    columns: ClassVar = {"text": Column("text"), "text_pair": Column("text", optional=True), "label": Column("label")}

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """Their names both ways, and that a row has one of them."""
        return {
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: index for index, label in enumerate(labels)},
            "problem_type": "single_label_classification",
        }

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        """Pads to the longest row."""
        from training.batching import PadToLongest

        return PadToLongest(tokenizer, multiple)

    def predictions(self, logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int64]:
        """(N, L) logits to (N,) label indices; the lower index where two are equal."""
        return logits.argmax(axis=-1).astype("int64")

    def probabilities(self, logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """(N, L) logits to (N, L) probabilities, each row adding up to one."""
        import numpy as np

        shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))
