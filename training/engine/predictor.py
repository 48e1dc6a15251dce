"""Predictions of a trained model for single rows, through the same features and batches as in an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from training.batching.batches import TokenRows
from training.engine.inference import predict
from training.evaluation.stored_calibration import Calibration
from training.models import loading
from training.task_types.task_type import TaskType
from training.tokenization.features import RefusedRows, find_beyond
from training.tokenization.special_tokens import find_spelt
from training.tokenization.transformers_encoder import load_encoder

BATCH_ROWS = 32


class Predictor:
    """A model with its tokenizer, by default on the CPU in full precision.

    Rows are truncated to `max_length` tokens. Raises UserError if the tokenizer cannot be read.

    Args:
        task_type: of the model.
        folder: of its weights.
        tokenizer: the folder of its tokenizer.
        max_length: tokens a row.
        batch_rows: rows in one forward pass.
        mixed_precision: no, bf16 or fp16.
        calibration: by which probabilities are given; by default those of the model.
        device: where the model computes.
    """

    def __init__(
        self,
        task_type: TaskType,
        folder: Path,
        tokenizer: Path,
        max_length: int,
        *,
        batch_rows: int = BATCH_ROWS,
        mixed_precision: str = "no",
        calibration: Calibration | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.task_type, self._batch_rows, self._precision = task_type, batch_rows, mixed_precision
        self._calibration = calibration
        self.encoder = load_encoder(tokenizer, folder, max_length)
        self.tokenizer = loading.load_tokenizer(tokenizer, folder)
        self._collate = task_type.collator(self.tokenizer, loading.padding_multiple())
        self.network = loading.load_trained(task_type, folder).to(device)
        self.labels: list[str] = task_type.labels_of(self.network.config)
        """The names of the labels, in the order of the outputs."""
        if calibration is not None:
            calibration.require_labels(self.labels)
        self._vocab_size = loading.vocab_size(self.network)
        self.spelt = 0
        """Rows so far whose texts spell special tokens, which are read as such."""
        self.beyond = 0
        """Rows so far with tokens that the model does not have, whose records are empty."""
        self.refused: Counter[str] = Counter()
        """Rows so far that the chat template refuses, by the reason. Their records are empty, too."""

    @property
    def record_types(self) -> dict[str, pa.DataType]:
        """The names and types of a record's fields."""
        if self._calibration is not None:
            return self._calibration.record_types(self.task_type)
        return dict(self.task_type.record_types(self.labels))

    def warnings(self) -> Iterator[str]:
        """What is to be said of the rows so far."""
        if self.beyond:
            yield (
                f"{self.beyond:,} rows have no prediction, because their texts have tokens that the model does not "
                f"have: its embedding has {self._vocab_size:,} rows, and its tokenizer has more tokens."
            )
        for reason, count in self.refused.items():
            yield f"{count:,} rows have no prediction, because the chat template refuses them: {reason}."
        if self.spelt:
            yield f"{self.spelt:,} rows spell special tokens: the model reads them as marks of its own, not as text."

    def predict(self, rows: pa.RecordBatch, report: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """A record for each row, with the names and types of `record_types`; an empty one for a row with tokens that
        the model does not have, or that its chat template refuses. The rows have the task type's columns except for the
        label. `report` is called with the number of rows that are done."""
        return self.predict_and_count(rows, report)[0]

    def predict_and_count(
        self, rows: pa.RecordBatch, report: Callable[[int], None] | None = None
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """As `predict`, and the number of tokens of each row; 0 for a row with an empty record."""
        if not rows.num_rows:
            return [], []
        report = report or _no_report
        try:
            features = self.task_type.features(self.encoder, rows).rows
        except RefusedRows as error:
            self.refused.update(error.reasons)
            return self._predict_without(error.rows, rows, report)
        beyond = np.unique(find_beyond(features, self._vocab_size))
        if len(beyond):
            self.beyond += len(beyond)
            return self._predict_without(beyond.tolist(), rows, report)
        spelt = find_spelt(rows, self.encoder.special_texts)[0] & ~self.task_type.is_rendered(rows)
        self.spelt += int(np.count_nonzero(spelt))
        token_rows = TokenRows(
            pa.Table.from_batches(self.task_type.token_rows("rows", self.encoder.max_length, iter([features])))
        )
        # Of a model that generates texts, the second pass takes nearly all of the time; of others the first.
        passes = (_no_report, report) if self.task_type.generates_text else (report, _no_report)
        found = predict(
            self.task_type, self.network, token_rows, self._collate, self._batch_rows, self._precision, passes[0]
        )
        # Texts are generated in batches of this order: similar lengths need little padding.
        order = np.argsort(-token_rows.tokens, kind="stable")
        records = []
        for places in np.array_split(order, -(-len(order) // self._batch_rows)):
            records += self._complete(found.take(pa.array(places)), rows.take(pa.array(places)))
            passes[1](len(records))
        in_order: list[dict[str, Any]] = [{}] * len(records)
        for place, record in zip(order.tolist(), records, strict=True):
            in_order[place] = record
        return in_order, token_rows.tokens.tolist()

    def _predict_without(
        self, unusable: Collection[int], rows: pa.RecordBatch, report: Callable[[int], None]
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """The records and tokens of the rows, empty for the unusable ones."""
        kept = np.setdiff1d(np.arange(rows.num_rows), [*unusable]).astype(np.int64)
        of_kept = zip(*self.predict_and_count(rows.take(pa.array(kept)), report), strict=True)
        found = [({}, 0) if row in unusable else next(of_kept) for row in range(rows.num_rows)]
        return [record for record, _ in found], [tokens for _, tokens in found]

    def _complete(self, predictions: pa.Table, rows: pa.RecordBatch) -> list[dict[str, Any]]:
        dtype, kind = loading.DTYPES[self._precision], self.network.device.type
        with torch.autocast(kind, dtype, enabled=self._precision != "no"):
            predictions = self.task_type.predictions_on_request(
                predictions, rows, self.network, self.tokenizer, self.encoder
            )
        predictions = self.task_type.decode(predictions, self.tokenizer)
        if self._calibration is not None:
            return self._calibration.to_records(self.task_type, predictions)
        return self.task_type.to_records(predictions, self.labels)


def _no_report(done: int) -> None:
    """Reports nothing."""
