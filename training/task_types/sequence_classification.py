"""Sequence classification: one label for a text or a pair of texts.

A row of the data set        {"text": "A gripping film.", "label": 1}
becomes token features       {"input_ids": [101, 1037, ..., 102], "length": 7, "label": 1}
and, padded in a batch,      {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B,)}
the model outputs            logits (B, L), and the prediction is the label of the largest one.

B rows of a batch, N rows of a split, T tokens (those of the longest row, or a few more), L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from training.recipe.tables.metrics import ONE_LABEL, metrics_for
from training.task_types.sequence_level import (
    TEXTS,
    SequenceLevelTask,
    as_lists,
    label_names_config,
    logits_of,
    replaced,
)
from training.task_types.task_type import Column

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.evaluation.constant_predictions import Baseline
    from training.evaluation.predictions import OneLabel
    from training.recipe import Training
    from training.task_types.losses import Loss


class SequenceClassification(SequenceLevelTask):
    """One label for each row."""

    serves: ClassVar = {"label": "string", "score": "double"}
    card_sentence = "Gives a {text} one of {labels}"
    columns: ClassVar = {**TEXTS, "label": Column("label")}
    prediction_type: ClassVar = ONE_LABEL
    metrics: ClassVar = metrics_for(ONE_LABEL)
    loss_fields: ClassVar = ("loss", "focal_gamma", "class_weights", "label_smoothing_factor")

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """The labels' names, and one label for each row."""
        return {**label_names_config(labels), "problem_type": "single_label_classification"}

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """Cross entropy, focal or the user's loss, optionally with class weights."""
        from training.task_types.losses import classification as losses

        return losses.make_loss(training, labels, train.labels, outside=outside)

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, the index of a label, and `logits`, a list of L."""
        return _table(outputs["logits"].float().cpu().numpy())

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> OneLabel:
        from training.evaluation.predictions import OneLabel

        references, chosen = (predictions[name].to_numpy() for name in ("label", "prediction"))
        return OneLabel(references, chosen, probabilities(logits_of(predictions, len(labels))), labels)

    def empty_predictions(self, labels: Sequence[str]) -> OneLabel:
        import numpy as np

        from training.evaluation.predictions import OneLabel

        return OneLabel(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, len(labels))), labels)

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """One label for every row, with the frequencies of the training labels as probabilities."""
        from dataclasses import replace
        from functools import partial

        import numpy as np

        from training.evaluation.constant_predictions import Baseline, Constant, column, most_frequent, smoothed
        from training.evaluation.predictions import OneLabel

        counts = np.bincount(column(data / "train.arrow", "label").to_numpy(), minlength=len(labels))
        given = smoothed(counts)

        def answered(label: int, rows: OneLabel, split: str) -> OneLabel:
            probabilities = np.broadcast_to(given, (len(rows), len(labels)))
            return replace(rows, predictions=np.full(len(rows), label), probabilities=probabilities)

        chosen = dict.fromkeys([*most_frequent(counts), *([1] if len(labels) == 2 else [])])
        every = np.arange(len(labels))
        train = OneLabel(every, every, np.broadcast_to(given, (len(labels), len(labels))), labels)
        return Baseline([Constant(repr(labels[label]), partial(answered, label)) for label in chosen], train, counts)

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`label`; its `probability`; and `probabilities`, by label."""
        import pyarrow as pa

        every = pa.struct([(label, pa.float64()) for label in labels])
        return {"label": pa.string(), "probability": pa.float64(), "probabilities": every}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        names = [labels[place] for place in predictions["prediction"].to_pylist()]
        rows = (
            dict(zip(labels, row, strict=True)) for row in probabilities(logits_of(predictions, len(labels))).tolist()
        )
        return [
            {"label": label, "probability": row[label], "probabilities": row}
            for label, row in zip(names, rows, strict=True)
        ]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares the probabilities alone: either of two equally likely labels may be predicted."""
        return super().same_prediction(given["probabilities"], stored["probabilities"], tolerance)

    def same_served(self, served: Any, stored: Sequence[Mapping[str, Any]], tolerance: float) -> bool:
        """Compares the probability of the likeliest label."""
        pairs = zip(served["score"], stored, strict=True)
        return all(abs(score - answer["probability"]) <= tolerance for score, answer in pairs)

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The labels with their probabilities, the likeliest first."""
        every = sorted(record["probabilities"].items(), key=lambda one: -one[1])
        return [f"{probability:6.1%}  {label}" for label, probability in every]

    def remap_labels(self, predictions: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """Matches labels by name. A label that the model lacks gets probability 0. The probability of labels that only
        the model has goes to the likeliest shared label that is not the true one, so it counts as wrong."""
        import numpy as np

        logits, references = logits_of(predictions, len(theirs)), predictions["label"].to_numpy()
        columns = [place for place, name in enumerate(labels) if name in theirs]
        sources = [theirs.index(labels[place]) for place in columns]
        dropped = [place for place, name in enumerate(theirs) if name not in labels]
        ordered = np.full((len(logits), len(labels)), -np.inf, dtype=np.float32)
        chosen = None
        if not dropped:
            ordered[:, columns] = logits[:, sources]
        else:
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
        return replaced(predictions, _table(ordered, chosen))


def probabilities(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """(N, L) logits to (N, L) probabilities, each row adding up to one."""
    import numpy as np

    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def _table(logits: npt.NDArray[np.float32], predictions: npt.NDArray[np.int64] | None = None) -> pa.RecordBatch:
    import numpy as np
    import pyarrow as pa

    if predictions is None:
        predictions = np.asarray(logits.argmax(axis=-1), dtype=np.int64)  # the lower index where two are equal
    return pa.RecordBatch.from_pydict({"prediction": predictions, "logits": as_lists(logits)})
