"""Language modeling: rows are texts, predictions are sums over each text's target tokens.

Logits (B, T, V) are never stored. B rows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.evaluation.constant_predictions import Baseline, Constant, smooth_counts
from training.evaluation.predictions import Likelihoods
from training.models.repository_files import read_json
from training.recipe.tables.metrics import TOKENS, metrics_for
from training.task_types.targets import HasTargets
from training.task_types.task_type import Column, LearnsTokens

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.evaluation.predictions import Predictions
    from training.recipe import Training
    from training.recipe.task_specification import TargetForm
    from training.task_types.task_type import Loss


class LanguageModeling(LearnsTokens, HasTargets):
    """The base of causal and masked language models."""

    columns: ClassVar[Mapping[str, Column]] = {"text": Column("text")}
    takes_documents: ClassVar = True
    prediction_type: ClassVar = TOKENS
    metrics: ClassVar[Sequence[str]] = metrics_for(TOKENS)
    target_form: ClassVar[TargetForm | None] = "tokens"

    @property
    @abstractmethod
    def generated_column(self) -> str:
        """The column of generated text in `predictions_on_request`; empty if nothing is generated."""

    def generated_types(self) -> Mapping[str, pa.DataType]:
        """The columns that `predictions_on_request` adds, with their types."""
        return {self.generated_column: pa.string()} if self.generated_column else {}

    def generated_values(self, predictions: pa.Table) -> list[dict[str, Any]]:
        """The values of these columns, by row; none in the predictions of an evaluation, which generates no text."""
        there = [name for name in self.generated_types() if name in predictions.column_names]
        rows: list[dict[str, Any]] = predictions.select(there).to_pylist() if there else [{}] * predictions.num_rows
        return rows

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """Cross entropy outside of the model: the loss inside is NaN for a batch without targets. None if Liger fuses
        it with the output layer. Or another loss of each target token."""
        if training.loss != "cross_entropy":
            return super().loss(training, labels, train, outside=outside)
        if self.causal and training.use_liger_kernel and not outside and not training.label_smoothing_factor:
            return None
        from training.task_types.losses.token_likelihood import TokenLoss

        return TokenLoss(self.causal, training.label_smoothing_factor)

    def targets(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from training.task_types.losses.target_losses import select_targets
        from training.task_types.losses.token_likelihood import shift_labels

        return select_targets(logits, shift_labels(labels) if self.causal else labels)

    def target_count(self, batch: Batch) -> int:
        from training.batching.batches import IGNORED

        return int((self.target_ids(batch) != IGNORED).sum())

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """The columns of losses.token_likelihood.sums_by_row."""
        from training.task_types.losses.token_likelihood import sums_by_row

        return sums_by_row(outputs["logits"], self.target_ids(batch))

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Predictions:
        names = ("loss", "targets", "hits", *(["tokens"] if "tokens" in predictions.column_names else []))
        return Likelihoods(*(predictions[name].to_numpy() for name in names))

    def empty_predictions(self, labels: Sequence[str]) -> Predictions:
        return Likelihoods(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The unigram distribution of the training targets, with Laplace smoothing over the vocabulary."""
        config = read_json(model / "config.json")
        counts = np.zeros((config if "vocab_size" in config else config["text_config"])["vocab_size"], np.int64)
        for ids, _ in self.target_tokens(tokens / "train.arrow", model):
            counts += np.bincount(ids, minlength=len(counts))
        losses, likeliest = -np.log(smooth_counts(counts)), int(counts.argmax())

        def predict(rows: Likelihoods, split: str) -> Likelihoods:
            loss, targets, hits = np.zeros((3, len(rows)))
            for ids, row in self.target_tokens(tokens / f"{split}.arrow", model):
                loss += np.bincount(row, losses[ids], len(rows))
                targets += np.bincount(row, minlength=len(rows))
                hits += np.bincount(row, ids == likeliest, len(rows))
            return Likelihoods(loss, targets.astype(np.int64), hits.astype(np.int64), rows.tokens)

        return Baseline([Constant("of the training tokens' frequencies", predict)])

    @abstractmethod
    def target_tokens(self, file: Path, model: Path) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """The (T,) ids of a split's target tokens and the (T,) row of each, block by block. `model` is the folder of a
        model with its tokenizer."""

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`loss`, the mean cross entropy of `targets` tokens, and `perplexity`, its exponential, both null without
        targets; and the generated text."""
        return {"loss": pa.float64(), "targets": pa.int64(), "perplexity": pa.float64(), **self.generated_types()}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        records = []
        for row in predictions.select(["loss", "targets"]).to_pylist():
            mean = row["loss"] / row["targets"] if row["targets"] else None
            perplexity = None if mean is None else math.exp(min(mean, 700.0))  # exp of more overflows
            records.append({"loss": mean, "targets": row["targets"], "perplexity": perplexity})
        for record, generated in zip(records, self.generated_values(predictions), strict=True):
            record |= generated
        return records

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares only the mean loss, because the perplexity multiplies its rounding. The tolerance is larger for few
        tokens: bf16 rounds large logits coarsely, such as GPT-2's near -100 to multiples of 0.5."""
        each = 20 * tolerance / math.sqrt(max(stored["targets"], 1))
        return super().same_prediction({"loss": given["loss"]}, {"loss": stored["loss"]}, tolerance + each)

    def target_ids(self, batch: Batch) -> torch.Tensor:
        from training.task_types.losses.token_distillation import token_labels
        from training.task_types.losses.token_likelihood import shift_labels

        labels = token_labels(batch["labels"])
        return shift_labels(labels) if self.causal else labels
