"""Regression: a number for a text or a pair of texts, such as a rating or a similarity.

A row of the data set        {"text": "A gripping film.", "label": 4.5}
token features               {"input_ids": [101, 1037, ..., 102], "length": 7, "label": 4.5}
a padded batch               {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B,)}, float32
the model's output           logits (B, 1), which are the predictions

The loss is the mean squared error. Training is slow for labels far from 1 in size: scale them in the rows.

B rows of a batch, N rows of a split, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from training.evaluation.constant_predictions import constant_numbers
from training.evaluation.predictions import Numbers
from training.recipe.tables.metrics import NUMBERS, metrics_for
from training.task_types.sequence_level import TEXTS, SequenceLevelTask
from training.task_types.targets import HasTargets, chooses_loss
from training.task_types.task_type import Column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.evaluation.constant_predictions import Baseline
    from training.recipe import Training
    from training.task_types.task_type import Loss


class Regression(SequenceLevelTask, HasTargets):
    """A number for each row."""

    teacher_outputs = "numbers"
    target_form = "numbers"
    serves: ClassVar = {"label": "string", "score": "double"}
    card_sentence = "Gives a {text} a number"
    columns: ClassVar = {**TEXTS, "label": Column("number")}
    prediction_type: ClassVar = NUMBERS
    metrics: ClassVar = metrics_for(NUMBERS)

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """Mean squared error, inside of the model or outside; or the user's loss of each row."""
        if chooses_loss(training):
            return super().loss(training, labels, train, outside=outside)
        return squared_error if outside else None

    def targets(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits[:, 0], labels

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, a number (float64)."""
        return pa.RecordBatch.from_pydict({"prediction": outputs["logits"].double().cpu().numpy()[:, 0]})

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        return {"prediction": pa.float64()}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        return [{"prediction": value} for value in predictions["prediction"].to_pylist()]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """The tolerance is relative to the stored number."""
        return super().same_prediction(given, stored, tolerance * max(1.0, abs(stored["prediction"])))

    def same_served(self, served: Any, stored: Sequence[Mapping[str, Any]], tolerance: float) -> bool:
        pairs = zip(served["score"], stored, strict=True)
        return all(self.same_prediction({"prediction": float(score)}, record, tolerance) for score, record in pairs)

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Numbers:
        return Numbers(predictions["label"].to_numpy(), predictions["prediction"].to_numpy())

    def empty_predictions(self, labels: Sequence[str]) -> Numbers:
        return Numbers(np.empty(0), np.empty(0))

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The mean of the training numbers, or their median."""
        return constant_numbers(data / "train.arrow", "label")


def squared_error(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """() the mean over the rows; logits (B, 1), labels (B,)."""
    import torch

    return torch.nn.functional.mse_loss(logits.float()[:, 0], labels)
