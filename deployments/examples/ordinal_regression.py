"""Ordinal regression: one of ordered labels, such as 1 to 5 stars, for a text. An example of a user's task type.

A row of the data set        {"text": "A gripping film.", "label": 4}
a padded batch               {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B,)}
the model's output           logits (B, L - 1): of the label being above each of the first L - 1 labels

The labels are whole numbers, which need not be consecutive. Frank and Hall, A Simple Approach to Ordinal Classification
(2001). A recipe names the class as `task: ordinal_regression:OrdinalRegression`; docs/how-to/own-task-type.md explains
this file.

B rows of a batch, N rows of a split, T tokens, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from training.evaluation.predictions import Predictions, Rows
from training.task_types.sequence_level import TEXTS, SequenceLevelTask, logits_column, logits_of
from training.task_types.targets import HasTargets, chooses_loss
from training.task_types.task_type import Column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.task_types.task_type import Loss


class OrdinalRegression(SequenceLevelTask, HasTargets):
    """One of ordered labels for each row."""

    # Declarations

    class Options(SequenceLevelTask.Options):
        smoothing: float = Field(default=0.0, ge=0, lt=0.5)
        """The probability that is taken from each answer of a training row."""

    options: Options
    option_stages: ClassVar = dict.fromkeys(("load_data", "tokenize", "predict", "score", "compare"), ())
    columns: ClassVar = {**TEXTS, "label": Column("label")}
    checks: ClassVar = {"ranks": "error"}
    pipeline = False  # transformers has none
    card_sentence = "Gives a {text} one of {labels}, in this order"
    metrics: ClassVar = ("rank_error", "exact")
    target_form = "binary"

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """An output for each label but the last; and the labels, which have no place in a config of other lengths."""
        return {"num_labels": len(labels) - 1, "ordered_labels": list(labels)}

    def labels_of(self, config: PreTrainedConfig) -> list[str]:
        return list(config.ordered_labels)

    # Rows

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask]]:
        """Labels that are no whole numbers: their order is not known."""
        labels = rows.column("label").to_pylist()
        yield "ranks", "has a label that is no whole number", np.array([not _is_whole(label) for label in labels], bool)

    # Training

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """Binary cross entropy of each output, or the loss that the recipe chooses."""
        usual = partial(binary_losses, smoothing=self.options.smoothing)
        return super().loss(training, labels, train, outside=outside) if chooses_loss(training) else usual

    def targets(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits and the answers, (B, L - 1) each."""
        return logits, answers(labels, logits.shape[1], self.options.smoothing)

    # Predictions

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, the index of a label, and `logits`, a list of L - 1."""
        logits = outputs["logits"].float().cpu().numpy()
        return pa.RecordBatch.from_pydict({"prediction": (logits > 0).sum(axis=1), "logits": logits_column(logits)})

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Ranks:
        return Ranks(predictions["label"].to_numpy(), predictions["prediction"].to_numpy(), labels)

    def empty_predictions(self, labels: Sequence[str]) -> Ranks:
        return Ranks(np.empty(0, np.int64), np.empty(0, np.int64), labels)

    # Records

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`label`, and the probabilities of being `above` each label but the last."""
        return {"label": pa.string(), "above": pa.list_(pa.float64())}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        above = 1 / (1 + np.exp(-logits_of(predictions, len(labels) - 1).astype(np.float64)))
        return [
            {"label": labels[index], "above": row}
            for index, row in zip(predictions["prediction"].to_pylist(), above.tolist(), strict=True)
        ]

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        above = ", ".join(f"{probability:.1%}" for probability in record["above"])
        return [f"{record['label']}  (above each lower one: {above})"]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares only the probabilities: rounding may change the label at 0.5."""
        return super().same_prediction({"above": given["above"]}, {"above": stored["above"]}, tolerance)


def binary_losses(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """() the mean over rows and outputs; logits (B, L - 1), labels (B,)."""
    import torch

    targets = answers(labels, logits.shape[1], smoothing)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), targets)


def answers(labels: torch.Tensor, size: int, smoothing: float) -> torch.Tensor:
    """(B, L - 1) whether each label is above each of the first L - 1, without the probability that smoothing takes."""
    import torch

    above = (labels[:, None] > torch.arange(size, device=labels.device)).float()
    return above * (1 - 2 * smoothing) + smoothing


def _is_whole(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


@dataclass(frozen=True)
class Ranks(Predictions):
    """One of ordered labels a row."""

    references: Rows  # (N,)
    predictions: Rows  # (N,)
    labels: Sequence[str]

    means: ClassVar = OrdinalRegression.metrics
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
        """The distance of prediction and label in ranks, and whether they are equal."""
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
