"""A task type of a test: ordinal regression, one of ordered labels, such as 1 to 5 stars, for a text.

A row of the data set        {"text": "A gripping film.", "label": 4}
a padded batch               {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B,)}
the model's output           logits (B, L - 1): of the label being above each of the first L - 1 labels

The labels are in the order of their names. Frank and Hall, A Simple Approach to Ordinal Classification (2001).

B rows of a batch, N rows of a split, T tokens, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.evaluation.predictions import Predictions, Rows
from training.task_types.sequence_level import TEXTS, SequenceLevelTask, logits_column, logits_of
from training.task_types.task_type import Column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.recipe import Training
    from training.task_types.task_type import Loss


@dataclass(frozen=True)
class Ranks(Predictions):
    """One of ordered labels a row."""

    references: Rows  # (N,)
    predictions: Rows  # (N,)
    labels: Sequence[str]

    means: ClassVar = ("rank_error", "exact")
    row_score_name: ClassVar = "neg_rank_error"
    correct_metric: ClassVar = "exact"

    @property
    def description(self) -> str:
        return f"an ordinal regression with {len(self.labels)} labels"

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: Rows) -> Ranks:
        return Ranks(self.references[rows], self.predictions[rows], self.labels)

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        if feature == "rank_error":
            return -self.row_scores
        return self.correct.astype(np.float64) if feature == "exact" else None

    @property
    def row_scores(self) -> npt.NDArray[np.float64]:
        return -np.abs(self.predictions - self.references).astype(np.float64)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.predictions == self.references)

    @property
    def codes(self) -> tuple[Rows, Rows]:
        return self.references, self.predictions

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"label": self.labels[self.references[row]], "prediction": self.labels[self.predictions[row]]}


class OrdinalRegression(SequenceLevelTask):
    """One of ordered labels for each row."""

    pipeline = False
    card_sentence = "Gives a {text} one of {labels}, in this order"
    columns: ClassVar = {**TEXTS, "label": Column("label")}
    metrics: ClassVar = Ranks.means

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        return {"num_labels": len(labels) - 1, "ordered_labels": list(labels)}

    def labels_of(self, config: PreTrainedConfig) -> list[str]:
        return list(config.ordered_labels)

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        return binary_losses

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, the index of a label, and `logits`, a list of L - 1."""
        logits = outputs["logits"].float().cpu().numpy()
        return pa.RecordBatch.from_pydict({"prediction": (logits > 0).sum(axis=1), "logits": logits_column(logits)})

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Ranks:
        return Ranks(predictions["label"].to_numpy(), predictions["prediction"].to_numpy(), labels)

    def empty_predictions(self, labels: Sequence[str]) -> Ranks:
        return Ranks(np.empty(0, np.int64), np.empty(0, np.int64), labels)

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        return {"label": pa.string(), "above": pa.list_(pa.float64())}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        above = 1 / (1 + np.exp(-logits_of(predictions, len(labels) - 1).astype(np.float64)))
        return [
            {"label": labels[index], "above": row}
            for index, row in zip(predictions["prediction"].to_pylist(), above.tolist(), strict=True)
        ]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        return super().same_prediction({"above": given["above"]}, {"above": stored["above"]}, tolerance)


def binary_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """() the mean over the rows; logits (B, L - 1), labels (B,)."""
    import torch

    above = (labels[:, None] > torch.arange(logits.shape[1], device=logits.device)).float()
    return torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), above)
