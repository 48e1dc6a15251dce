"""Sequence-level tasks: one prediction for each text or pair of texts.

B rows of a batch, N rows of a split, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.data.vectors import as_lists, as_matrix
from training.task_types.task_type import Column, LearnsFromTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadToLongest

TEXTS = {"text": Column("text"), "text_pair": Column("text", optional=True)}


class SequenceLevelTask(LearnsFromTeacher):
    """The base of task types with one prediction for each text or pair of texts."""

    auto_class = "AutoModelForSequenceClassification"
    hub_task = "text-classification"

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        from training.batching.batches import PadToLongest

        return PadToLongest(tokenizer, multiple)

    def outputs_of_teacher(self, outputs: ModelOutput, batch: Batch) -> pa.ListArray:
        """The row's logits, or its number."""
        return logits_column(outputs["logits"].float().cpu().numpy())


class LabelProbabilities(SequenceLevelTask):
    """The base of task types whose records have `probabilities` by label."""

    problem_type: ClassVar[str]
    """The field of the model's config, which selects the loss inside of the model."""

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        return {**label_names_config(labels), "problem_type": self.problem_type}

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares only the probabilities: rounding may change a label whose probability is near a tie or threshold."""
        return super().same_prediction(given["probabilities"], stored["probabilities"], tolerance)


def label_names_config(labels: Sequence[str]) -> dict[str, Any]:
    """The fields of a model's config that name its labels."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def probability_type(labels: Sequence[str]) -> pa.DataType:
    """The type of `probabilities` by label in a record."""
    return pa.struct([(label, pa.float64()) for label in labels])


def logits_column(logits: npt.NDArray[np.float32]) -> pa.ListArray:
    """(B, L) logits as a column of lists."""
    return as_lists(logits)


def logits_of(predictions: pa.Table, labels: int) -> npt.NDArray[np.float32]:
    """(N, L) the column `logits` of predictions."""
    return as_matrix(predictions["logits"], labels)


def replace_columns(predictions: pa.Table, columns: pa.RecordBatch) -> pa.Table:
    for name in columns.schema.names:
        predictions = predictions.set_column(predictions.column_names.index(name), name, columns[name])
    return predictions
