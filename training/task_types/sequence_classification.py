"""Sequence classification: one label for a text or a pair of texts.

A row of the data set        {"text": "A gripping film.", "label": 1}
token features               {"input_ids": [101, 1037, ..., 102], "length": 7, "label": 1}
a padded batch               {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B,)}
the model's output           logits (B, L); the prediction is the label of the largest one

B rows of a batch, N rows of a split, T tokens of the batch's longest row, L labels, H dimensions of an embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import PositiveFloat

from training.evaluation.constant_predictions import Baseline, Constant, most_frequent, read_column, smooth_counts
from training.evaluation.predictions import OneLabel
from training.problems import UserError
from training.recipe.tables.metrics import ONE_LABEL, metrics_for
from training.task_types.sequence_level import (
    TEXTS,
    LabelProbabilities,
    logits_column,
    logits_of,
    probability_type,
    replace_columns,
)
from training.task_types.targets import HasTargets
from training.task_types.task_type import Column, FittedHead, WholeStep

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.recipe import Training
    from training.task_types.losses.contrastive_loss import SupervisedContrast
    from training.task_types.task_type import Loss

CONTRASTIVE = ("contrastive", "temperature")
"""The options of contrastive training."""
FEWEST_CONTRASTED = 4
"""Rows of an optimizer step of a process, for contrastive training."""


class SequenceClassification(LabelProbabilities, HasTargets):
    """One label for each row."""

    class Options(LabelProbabilities.Options):
        """The options of training from a few rows of each label."""

        contrastive: bool = False
        """For a few rows of each label: whether training makes the embeddings of rows with the same label similar,
        before a head is fitted to them (docs/how-to/few-labels.md)."""
        temperature: PositiveFloat = 0.1
        """Of the contrastive loss: similarities are divided by it."""

    options: Options
    problem_type = "single_label_classification"
    teacher_outputs = "classes"
    serves: ClassVar = {"label": "string", "score": "double"}
    card_sentence = "Gives a {text} one of {labels}"
    columns: ClassVar = {**TEXTS, "label": Column("label")}
    prediction_type: ClassVar = ONE_LABEL
    metrics: ClassVar = metrics_for(ONE_LABEL)
    target_form = "classes"

    def options_of(self, stage: str) -> dict[str, Any]:
        """Without the options of contrastive training, except those of a training that is."""
        found = super().options_of(stage)
        is_used = stage == "fit" and self.options.contrastive
        return found if is_used else {name: found[name] for name in found if name not in CONTRASTIVE}

    def while_training(self, strategy: str) -> Self:
        return cast(Self, ContrastiveClassification(self.options.model_dump())) if self.options.contrastive else self

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """Cross entropy inside of the model, whose labels the engine smooths; or the loss of each row."""
        if training.loss == "cross_entropy" and training.class_weights is None and not outside:
            return None
        return super().loss(training, labels, train, outside=outside)

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, the index of a label, and `logits`, a list of L."""
        return _table(outputs["logits"].float().cpu().numpy())

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> OneLabel:
        references, chosen = (predictions[name].to_numpy() for name in ("label", "prediction"))
        return OneLabel(references, chosen, probabilities(logits_of(predictions, len(labels))), labels)

    def empty_predictions(self, labels: Sequence[str]) -> OneLabel:
        return OneLabel(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, len(labels))), labels)

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """One label for every row, with the frequencies of the training labels as probabilities."""
        counts = np.bincount(read_column(data / "train.arrow", "label").to_numpy(), minlength=len(labels))
        frequencies = smooth_counts(counts)

        def predict(label: int, rows: OneLabel, split: str) -> OneLabel:
            probabilities = np.broadcast_to(frequencies, (len(rows), len(labels)))
            return replace(rows, predictions=np.full(len(rows), label), probabilities=probabilities)

        candidates = dict.fromkeys([*most_frequent(counts), *([1] if len(labels) == 2 else [])])
        indices = np.arange(len(labels))
        train = OneLabel(indices, indices, np.broadcast_to(frequencies, (len(labels), len(labels))), labels)
        return Baseline([Constant(repr(labels[label]), partial(predict, label)) for label in candidates], train, counts)

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`label`; its `probability`; and `probabilities`, by label."""
        return {"label": pa.string(), "probability": pa.float64(), "probabilities": probability_type(labels)}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        rows = probabilities(logits_of(predictions, len(labels))).tolist()
        return [
            {"label": labels[index], "probability": row[index], "probabilities": dict(zip(labels, row, strict=True))}
            for index, row in zip(predictions["prediction"].to_pylist(), rows, strict=True)
        ]

    def same_served(self, served: Any, stored: Sequence[Mapping[str, Any]], tolerance: float) -> bool:
        """Compares the probability of the likeliest label."""
        pairs = zip(served["score"], stored, strict=True)
        return all(abs(score - record["probability"]) <= tolerance for score, record in pairs)

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The labels with their probabilities, the likeliest first."""
        ordered = sorted(record["probabilities"].items(), key=lambda item: -item[1])
        return [f"{probability:6.1%}  {label}" for label, probability in ordered]

    def remap_labels(self, predictions: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """Matches labels by name. A label that the model lacks gets probability 0. The probability of labels that only
        the model has is added to the likeliest shared label that is not the true one, so it counts as wrong."""
        logits, references = logits_of(predictions, len(theirs)), predictions["label"].to_numpy()
        columns = [place for place, name in enumerate(labels) if name in theirs]
        sources = [theirs.index(labels[place]) for place in columns]
        dropped = [place for place, name in enumerate(theirs) if name not in labels]
        ordered = np.full((len(logits), len(labels)), -np.inf, dtype=np.float32)
        if not dropped:
            ordered[:, columns] = logits[:, sources]
            return replace_columns(predictions, _table(ordered))
        rows, given = np.arange(len(logits)), probabilities(logits)
        shared = np.zeros(ordered.shape)
        shared[:, columns] = given[:, sources]
        others = shared.copy()
        others[rows, references] = -1.0
        wrong = others.argmax(axis=-1)
        chosen = np.where(np.isin(logits.argmax(axis=-1), dropped), wrong, shared.argmax(axis=-1))
        shared[rows, wrong] += given[:, dropped].sum(axis=-1)
        with np.errstate(divide="ignore"):
            ordered = np.log(shared).astype(np.float32)
        return replace_columns(predictions, _table(ordered, chosen))


class ContrastiveClassification(SequenceClassification, WholeStep, FittedHead):
    """Sequence classification with options.contrastive, during training.

    The model has no head: its logits are the embeddings (B, H), or of a micro-batch of a step the loss of the step, ().
    After training, a head is fitted to the embeddings, so the exported model is an ordinary classifier.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.loss_only_reason = "the head is fitted after training: evaluations before give only the contrastive loss."

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        from training.models.classifier_inputs import read_embedding, take_head

        read_embedding(model)
        take_head(model)

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        from transformers.utils import ModelOutput

        from training.task_types.losses.embedding_loss import is_prepared, step_loss

        if is_prepared(batch):
            return ModelOutput(logits=step_loss(self._embed, self._contrast, model, batch))
        return super().forward(model, batch)

    def _embed(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """(B, H)"""
        from training.task_types.losses.embedding_loss import ADDED

        inputs = {name: tensor for name, tensor in batch.items() if name not in ADDED}
        embeddings: torch.Tensor = super().forward(model, inputs)["logits"]
        return embeddings

    @property
    def _contrast(self) -> SupervisedContrast:
        from training.task_types.losses.contrastive_loss import SupervisedContrast

        return SupervisedContrast(self.options.temperature)

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss:
        """The contrastive loss. Raises UserError if there are no pairs of rows with the same label."""
        rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
        if rows < FEWEST_CONTRASTED:
            message = f"{rows} rows a step are too few to compare, and options.contrastive needs {FEWEST_CONTRASTED}: "
            message += "raise it, or gradient_accumulation_steps; 32 rows a step are usual."
            raise UserError.of("training", "training.per_device_train_batch_size", message)
        single = [labels[label] for label, count in Counter(train.labels.tolist()).items() if count < 2]
        if single:
            message = f"the train split has one row of {', '.join(map(repr, single[:5]))}, and options.contrastive "
            raise UserError.of("recipe", "data", f"{message}needs two of each label: add rows, or leave it out.")
        return self._contrast

    def partners(self, rows: TokenRows) -> npt.NDArray[np.int64]:
        return rows.labels

    def prepare_step(
        self, model: PreTrainedModel, batches: Sequence[Batch], gather: Callable[[Any], list[Any]]
    ) -> list[Batch]:
        from training.task_types.losses.embedding_loss import cache_gradients

        return cache_gradients(self._embed, self._contrast, model, batches, gather)

    def fit_head(
        self, embeddings: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], count: int, *, with_bias: bool
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        from training.task_types.losses.contrastive_loss import logistic_regression

        return logistic_regression(embeddings, labels, count, with_bias=with_bias)


def probabilities(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """(N, L) the softmax of (N, L) logits."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def _table(logits: npt.NDArray[np.float32], predictions: npt.NDArray[np.int64] | None = None) -> pa.RecordBatch:
    if predictions is None:
        predictions = np.asarray(logits.argmax(axis=-1), dtype=np.int64)  # of equal logits the lower index
    return pa.RecordBatch.from_pydict({"prediction": predictions, "logits": logits_column(logits)})
