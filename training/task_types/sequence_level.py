"""Sequence-level tasks: one prediction for each text or pair of texts.

B rows of a batch, N rows of a split, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.task_types.task_type import Column, TaskType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from training.batching.batches import PadToLongest

TEXTS = {"text": Column("text"), "text_pair": Column("text", optional=True)}


class SequenceLevelTask(TaskType):
    """The base of task types with one prediction for each text or pair of texts."""

    auto_class = "AutoModelForSequenceClassification"
    hub_task = "text-classification"

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        """Pads to the longest row."""
        from training.batching.batches import PadToLongest

        return PadToLongest(tokenizer, multiple)


def label_names_config(labels: Sequence[str]) -> dict[str, Any]:
    """The fields of a model's config that name its labels, by index and by name."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def as_lists(logits: npt.NDArray[np.float32]) -> pa.ListArray:
    """(B, L) logits as a column of lists."""
    import numpy as np
    import pyarrow as pa

    rows, width = logits.shape
    return pa.ListArray.from_arrays(np.arange(0, (rows + 1) * width, width, dtype=np.int32), logits.reshape(-1))


def logits_of(predictions: pa.Table, labels: int) -> npt.NDArray[np.float32]:
    """(N, L) the column `logits` of predictions."""
    found = predictions["logits"].combine_chunks().flatten().to_numpy()
    logits: npt.NDArray[np.float32] = found.reshape(len(predictions), labels)
    return logits


def replaced(predictions: pa.Table, columns: pa.RecordBatch) -> pa.Table:
    """The predictions with some columns replaced."""
    for name in columns.schema.names:
        predictions = predictions.set_column(predictions.column_names.index(name), name, columns[name])
    return predictions
