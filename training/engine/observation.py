"""Observations of rows by a trained model: its predictions, token statistics and embeddings, row by row.

N rows, B rows of a batch, T tokens of its longest row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from training.batching.batches import EvaluationBatches, TokenRows
from training.data.vectors import as_lists, as_matrix
from training.engine.inference import evaluate
from training.evaluation.stored_calibration import REVIEW, Calibration
from training.evaluation.text_statistics import FIELD
from training.models import loading
from training.tokenization.transformers_encoder import load_encoder_of

if TYPE_CHECKING:
    from training.batching.batches import Batch
    from training.task_types.task_type import TaskType

BATCH_ROWS = 32


class Observer:
    """A model with its tokenizer in full precision, on a GPU if there is one. Rows are truncated to `max_length`
    tokens, and observed in batches of `batch_rows`. By a `calibration`, it is also observed which rows are for a
    person. Raises UserError if the tokenizer cannot be read."""

    def __init__(
        self,
        task_type: TaskType,
        folder: Path,
        tokenizer: Path,
        max_length: int,
        batch_rows: int = BATCH_ROWS,
        calibration: Calibration | None = None,
    ) -> None:
        self._calibration = calibration
        self._task_type, self._batch_rows = task_type, batch_rows
        self._encoder = load_encoder_of(task_type, tokenizer, folder, max_length)
        self._tokenizer = loading.load_preprocessor(task_type, tokenizer, folder)
        self._collate = task_type.collator(self._tokenizer, loading.padding_multiple())
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._network = loading.load_trained(task_type, folder).to(device)
        self.labels: list[str] = task_type.labels_of(self._network.config)
        """The names of the labels, in the order of the outputs."""

    def observe(self, rows: pa.RecordBatch, report: Callable[[int], None] = lambda done: None) -> pa.Table:
        """A table (N rows) of the model's input columns, without targets, as load_data stores them.

        Its columns are `tokens`, `unknown` (their share that the tokenizer does not know; absent if it knows all
        texts), `embedding` (D), that of a model of embeddings, of others the mean of the last hidden states; and the
        predictions: a column `field.NAME` for each field of a record that is a number, a text, or a list of texts
        (joined). `report` is called with the number of rows that are done. Raises RefusedRows, before it begins, for
        rows that the chat template refuses.
        """
        features = iter([self._task_type.features(self._encoder, rows).rows])
        tokens = pa.Table.from_batches(self._task_type.token_rows("rows", self._encoder.max_length, features))
        token_rows = TokenRows(tokens)
        predictions, embeddings = self._predict(token_rows, report)
        columns: dict[str, Any] = {"tokens": token_rows.tokens}
        row_of = tokens["row"].to_numpy() if "row" in tokens.column_names else np.arange(len(embeddings))
        if (unknown := self._tokenizer.unk_token_id) is not None:
            counts = [np.count_nonzero(token_rows[row]["input_ids"] == unknown) for row in range(len(token_rows))]
            columns["unknown"] = np.bincount(row_of, counts, rows.num_rows) / np.maximum(1, token_rows.tokens)
        columns["embedding"] = _mean_by_row(embeddings, row_of, rows.num_rows)
        predictions = self._task_type.decode(predictions, self._tokenizer)
        columns |= _list_fields(self._task_type.to_records(predictions, self.labels))
        if self._calibration is not None and self._calibration.abstain is not None:
            review = self._calibration.review(self._calibration.judge(predictions))
            columns[FIELD + REVIEW] = np.where(review, "yes", "no")
        return pa.table(columns)

    def _predict(self, rows: TokenRows, report: Callable[[int], None]) -> tuple[pa.Table, np.ndarray[Any, Any]]:
        """The task type's predictions for the rows of the data, and the embeddings of the token rows."""
        task_type, network = self._task_type, self._network
        plan = EvaluationBatches(rows.lengths, self._batch_rows)
        hidden: list[torch.Tensor] = []
        lengths: list[int] = []

        def keep(module: torch.nn.Module, given: Any, output: Any) -> None:
            states = getattr(output, "encoder_last_hidden_state", None)
            hidden[:] = [states if states is not None else output[0]]

        def collated() -> Iterator[Batch]:
            for numbers in plan:
                lengths[:] = rows.lengths[numbers].tolist()
                yield self._collate([rows[number] for number in numbers])

        def predict_batch(batch: Batch) -> tuple[None, int, pa.RecordBatch]:
            inputs = {name: tensor.to(network.device) for name, tensor in batch.items()}
            found = task_type.predictions(network, task_type.forward(network, inputs), inputs)
            if task_type.embeds:  # rows without targets have one text
                return None, 1, found.append_column("embedding", found["embeddings"])
            if task_type.reads_images():  # the mean of all patches, or places of a convolution
                states = hidden[0].flatten(2).transpose(1, 2) if hidden[0].ndim == 4 else hidden[0]
                return None, 1, found.append_column("embedding", as_lists(states.mean(dim=1).float().cpu().numpy()))
            mask = inputs.get("attention_mask")
            if mask is None:  # of causal models, whose rows are padded on the right
                places = torch.arange(hidden[0].shape[1], device=network.device)
                mask = places[None] < torch.tensor(lengths, device=network.device)[:, None]
            mask = mask.unsqueeze(-1)  # (B, T, 1)
            mean = (hidden[0] * mask).sum(dim=1) / mask.sum(dim=1)  # (B, D)
            if (documents := inputs.get("documents")) is not None:  # each text has a line
                mean = torch.stack([of_row.mean(dim=0) for of_row in mean.split(documents.tolist())])
            return None, 1, found.append_column("embedding", as_lists(mean.float().cpu().numpy()))

        hook = network.base_model.register_forward_hook(keep)
        try:
            with torch.inference_mode():
                found = evaluate(collated(), plan, predict_batch, report).predictions
        finally:
            hook.remove()
        embeddings = as_matrix(found["embedding"], len(found["embedding"][0]))
        return task_type.join_labels(found.drop_columns("embedding"), rows), embeddings


def _mean_by_row(values: np.ndarray[Any, Any], row_of: np.ndarray[Any, Any], rows: int) -> pa.Array:
    """The mean over the token rows of each row of the data."""
    sums = np.zeros((rows, values.shape[1]), np.float32)
    np.add.at(sums, row_of, values)
    return as_lists(sums / np.maximum(1, np.bincount(row_of, minlength=rows))[:, None].astype(np.float32))


def _list_fields(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of the records that can be compared, as columns of numbers or texts."""
    found: dict[str, Any] = {}
    for name in records[0] if records else ():
        values = [record.get(name) for record in records]
        present = [value for value in values if value is not None]
        if present and all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
            found[FIELD + name] = pa.array([None if value is None else float(value) for value in values], pa.float64())
        elif present and all(isinstance(value, str) for value in present):
            found[FIELD + name] = pa.array(values, pa.string())
        elif present and all(isinstance(value, list) and all(isinstance(v, str) for v in value) for value in present):
            found[FIELD + name] = pa.array([", ".join(value or []) for value in values], pa.string())
    return found
