"""Predictions of a trained model for single rows, through the same features and batches as in an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from training.batching.batches import TokenRows
from training.engine.inference import predict
from training.models import loading
from training.task_types.task_type import TaskType
from training.tokenization.transformers_encoder import load_encoder

BATCH_ROWS = 32


class Predictor:
    """A model with its tokenizer, on the CPU in full precision.

    Rows are truncated to `max_length` tokens. Raises UserError if the tokenizer cannot be read.
    """

    def __init__(self, task_type: TaskType, folder: Path, tokenizer: Path, max_length: int) -> None:
        self._task_type = task_type
        self._encoder = load_encoder(tokenizer, folder, max_length)
        self._tokenizer = loading.load_tokenizer(tokenizer, folder)
        self._collate = task_type.collator(self._tokenizer, loading.padding_multiple())
        self._network = loading.load_trained(task_type, folder)
        self.labels: list[str] = task_type.labels_of(self._network.config)
        """The names of the labels, in the order of the outputs."""

    def predict(self, rows: pa.RecordBatch) -> list[dict[str, Any]]:
        """A record for each row, with the names and types of `TaskType.record_types`. The rows have the task type's
        columns except for the label."""
        if not rows.num_rows:
            return []
        features = iter([self._task_type.features(self._encoder, rows).rows])
        token_rows = pa.Table.from_batches(self._task_type.token_rows("rows", self._encoder.max_length, features))
        predictions = predict(self._task_type, self._network, TokenRows(token_rows), self._collate, BATCH_ROWS, "no")
        predictions = self._task_type.predictions_on_request(
            predictions, rows, self._network, self._tokenizer, self._encoder
        )
        return self._task_type.to_records(self._task_type.decode(predictions, self._tokenizer), self.labels)
