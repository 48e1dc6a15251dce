"""Predictions of a trained model for single rows, through the same features and batches as in an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from training.batching.batches import TokenRows
from training.engine.inference import predict
from training.evaluation.stored_calibration import Calibration
from training.models import loading
from training.task_types.task_type import TaskType
from training.tokenization.features import RefusedRows, find_beyond
from training.tokenization.special_tokens import find_spelt
from training.tokenization.transformers_encoder import load_encoder_of

BATCH_ROWS = 32
Places = npt.NDArray[np.integer[Any]]
Report = Callable[[int], None]


class TokenizedRows(NamedTuple):
    """Rows for the model."""

    total: int
    """The rows, with those that the model cannot read."""
    kept: Places
    """The places of the others."""
    rows: pa.RecordBatch
    """Those."""
    tokens: TokenRows | None
    """None without any."""


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
        self.encoder = load_encoder_of(task_type, tokenizer, folder, max_length)
        self._using_encoder = Lock()
        """Held while a thread uses the encoder, whose truncation is a state of its own."""
        self.tokenizer = loading.load_preprocessor(task_type, tokenizer, folder)
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

    def predict(self, rows: pa.RecordBatch, report: Report | None = None) -> list[dict[str, Any]]:
        """A record for each row, with the names and types of `record_types`; an empty one for a row with tokens that
        the model does not have, or that its chat template refuses. The rows have the task type's columns except for the
        label. `report` is called with the number of rows that are done."""
        return self.predict_and_count(rows, report)[0]

    def predict_and_count(
        self, rows: pa.RecordBatch, report: Report | None = None
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """As `predict`, and the number of tokens of each row; 0 for a row with an empty record."""
        records: list[dict[str, Any]] = [{}] * rows.num_rows
        tokens = [0] * rows.num_rows
        for places, lengths, predictions in self._compute(self.tokenize(rows), report or _no_report):
            found = zip(places.tolist(), lengths.tolist(), self._to_records(predictions), strict=True)
            for place, length, record in found:
                records[place], tokens[place] = record, length
        return records, tokens

    def predict_table(self, tokenized: TokenizedRows, report: Report | None = None) -> pa.Table:
        """The records of `predict` as columns. Embeddings become no Python objects."""
        schema = pa.schema(list(self.record_types.items()))
        parts, order = [schema.empty_table()], np.full(tokenized.total, -1)
        for places, _, predictions in self._compute(tokenized, report or _no_report):
            order[places] = sum(map(len, parts)) + np.arange(len(places))
            if self._calibration is None:
                parts.append(self.task_type.to_table(predictions, self.labels))
            else:
                parts.append(pa.Table.from_pylist(self._to_records(predictions), schema))
        return pa.concat_tables(parts).take(pa.array(order, mask=order < 0))

    def tokenize(self, rows: pa.RecordBatch) -> TokenizedRows:
        """The rows with their tokens, without those that the model cannot read. It may run in another thread while the
        model predicts other rows."""
        with self._using_encoder:
            return self._tokenize(rows)

    def _tokenize(self, rows: pa.RecordBatch) -> TokenizedRows:
        kept = np.arange(rows.num_rows)
        while len(kept):
            usable = rows.take(kept)
            try:
                features = self.task_type.features(self.encoder, usable).rows
            except RefusedRows as error:
                self.refused.update(error.reasons)
                kept = np.delete(kept, error.rows)
                continue
            if len(beyond := np.unique(find_beyond(features, self._vocab_size))):
                self.beyond += len(beyond)
                kept = np.delete(kept, beyond)
                continue
            spelt = find_spelt(usable, self.encoder.special_texts)[0] & ~self.task_type.is_rendered(usable)
            self.spelt += int(np.count_nonzero(spelt))
            tokens = self.task_type.token_rows("rows", self.encoder.max_length, iter([features]))
            return TokenizedRows(rows.num_rows, kept, usable, TokenRows(pa.Table.from_batches(tokens)))
        return TokenizedRows(rows.num_rows, kept, rows.slice(0, 0), None)

    def _compute(self, tokenized: TokenizedRows, report: Report) -> Iterator[tuple[Places, Places, pa.Table]]:
        """Yields, batch by batch, the places of rows, their numbers of tokens, and the decoded predictions for them."""
        _, kept, rows, token_rows = tokenized
        if token_rows is None:
            return
        # Of a model that generates texts, the second pass takes nearly all of the time; of others the first.
        passes = (_no_report, report) if self.task_type.generates_text else (report, _no_report)
        found = predict(
            self.task_type, self.network, token_rows, self._collate, self._batch_rows, self._precision, passes[0]
        )
        # Texts are generated in batches of this order: similar lengths need little padding.
        order, done = np.argsort(-token_rows.tokens, kind="stable"), 0
        for places in np.array_split(order, -(-len(order) // self._batch_rows)):
            yield kept[places], token_rows.tokens[places], self._complete(found.take(places), rows.take(places))
            done += len(places)
            passes[1](done)

    def _complete(self, predictions: pa.Table, rows: pa.RecordBatch) -> pa.Table:
        with self._using_encoder, loading.autocast(self.network.device, self._precision):
            predictions = self.task_type.predictions_on_request(
                predictions, rows, self.network, self.tokenizer, self.encoder
            )
        return self.task_type.decode(predictions, self.tokenizer)

    def _to_records(self, predictions: pa.Table) -> list[dict[str, Any]]:
        if self._calibration is not None:
            return self._calibration.to_records(self.task_type, predictions)
        return self.task_type.to_records(predictions, self.labels)


def _no_report(done: int) -> None:
    """Reports nothing."""
