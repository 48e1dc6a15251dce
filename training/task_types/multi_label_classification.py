"""Multi-label classification: any number of labels, or none, for a text or a pair of texts.

A row of the data set        {"text": "A gripping war film.", "label": ["war", "thriller"]}
token features               {"input_ids": [101, 1037, ..., 102], "length": 8, "label": [4, 2]}
a padded batch               {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B, P)}, padded with -1
the model's output           logits (B, L); the prediction is every label whose probability, the sigmoid of its logit,
                             is at least the label's threshold

The loss is the mean binary cross entropy of all labels. The model's config.json has the `thresholds` in the order of
the labels: 0.5 during training, then those with the best F1 of each label on the validation split.

B rows of a batch, N rows of a split, P the most labels of a row, L labels, T tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from training.data.row_problems import shorten
from training.evaluation.constant_predictions import MOST_CONSTANTS, Baseline, Constant, quote_names, read_column
from training.evaluation.predictions import ManyLabels
from training.recipe.tables.metrics import MANY_LABELS, metrics_for
from training.task_types.sequence_level import (
    TEXTS,
    LabelProbabilities,
    logits_column,
    logits_of,
    probability_type,
    replace_columns,
)
from training.task_types.targets import HasTargets, chooses_loss
from training.task_types.task_type import Calibrated, Column
from training.tokenization.features import list_column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.task_types.task_type import Loss

THRESHOLDS = "thresholds"
"""The name of the thresholds in the model's config and in the schema metadata of predictions (as JSON)."""
DEFAULT_THRESHOLD = 0.5
FREQUENT_SETS = 5
"""The number of frequent label sets that are tried as constant predictions."""


class MultiLabelClassification(LabelProbabilities, HasTargets, Calibrated):
    """Any number of labels for each row."""

    problem_type = "multi_label_classification"
    teacher_outputs = "labels"
    target_form = "labels"
    pipeline = False  # the text-classification pipeline returns one label and has no thresholds
    card_sentence = "Gives a {text} any number of {labels}"
    columns: ClassVar = {**TEXTS, "label": Column("labels", may_be_empty=True)}
    checks: ClassVar = {"label_vectors": "error"}
    prediction_type: ClassVar = MANY_LABELS
    metrics: ClassVar = metrics_for(MANY_LABELS)

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """Rows with a 0 or 1 for each label, as in one-hot vectors, which would be read as the labels 0 and 1."""
        given = rows.column("label")
        lengths, values = pc.list_value_length(given).to_pylist(), pc.list_flatten(given).unique()
        if len(given) > 1 and min(lengths) > 1 and len({*lengths}) == 1 and len(values) <= 2:
            message = "has a value for each label, such as 0 or 1: list the labels that the row has"
            yield "label_vectors", message, np.ones(len(given), bool), f", not {shorten(given[0].as_py())}"

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """The loss of models with this problem type, but from indices of labels; or that of each label of a row."""
        if not chooses_loss(training):
            return binary_cross_entropy
        return super().loss(training, labels, train, outside=outside)

    def targets(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits (B, L), and the labels as (B, L): 1 where the row has the label, else 0."""
        return logits, truths_of(logits.shape[1], labels).float()

    def label_counts(self, train: TokenRows, size: int) -> tuple[npt.NDArray[np.int64], int]:
        given = train.table["label"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return np.bincount(given.astype(np.int64), minlength=size), len(train)

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, the indices of the labels above the model's thresholds, and `logits`, a list of L."""
        logits = outputs["logits"].float().cpu().numpy()
        return _table(logits, getattr(model.config, THRESHOLDS, None) or [DEFAULT_THRESHOLD] * logits.shape[1])

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> ManyLabels:
        references = np.zeros((len(predictions), len(labels)), dtype=np.bool_)
        places = predictions["label"].combine_chunks()
        references[np.repeat(np.arange(len(places)), places.value_lengths()), places.flatten()] = True
        return ManyLabels(
            references, probabilities(logits_of(predictions, len(labels))), np.array(_thresholds(predictions)), labels
        )

    def empty_predictions(self, labels: Sequence[str]) -> ManyLabels:
        empty = np.empty((0, len(labels)))
        return ManyLabels(empty.astype(np.bool_), empty, np.full(len(labels), DEFAULT_THRESHOLD), labels)

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The same labels for every row, with the frequencies of the training labels as probabilities.

        The candidates are the most frequent label sets, the k most frequent labels for small k, the labels of more than
        half of the rows, and all labels.
        """
        sets = Counter(tuple(sorted(row)) for row in read_column(data / "train.arrow", "label").to_pylist())
        references, counts = np.zeros((len(sets), len(labels)), np.bool_), np.fromiter(sets.values(), np.int64)
        for has, places in zip(references, sets, strict=True):
            has[list(places)] = True
        of_label = counts @ references
        frequencies = (of_label + 1) / (counts.sum() + 2)  # Laplace smoothing with two outcomes for each label

        def predict(chosen: tuple[int, ...], rows: ManyLabels, split: str) -> ManyLabels:
            thresholds = np.where(np.isin(np.arange(len(labels)), chosen), 0.0, 2.0)  # 2.0 is above every probability
            probabilities = np.broadcast_to(frequencies, (len(rows), len(labels)))
            return replace(rows, probabilities=probabilities, thresholds=thresholds)

        def describe(chosen: tuple[int, ...]) -> str:
            if not chosen:
                return "no label"
            if len(chosen) == len(labels):
                return f"all {len(labels)} labels"
            return quote_names([labels[index] for index in sorted(chosen, key=order.index)])

        order = np.argsort(-of_label, kind="stable").tolist()
        sizes = [*range(min(MOST_CONSTANTS, len(labels))), int((of_label > counts.sum() / 2).sum()), len(labels)]
        frequent = [chosen for chosen, _ in sets.most_common(FREQUENT_SETS)]
        candidates = dict.fromkeys([*frequent, *(tuple(sorted(order[:size])) for size in sizes)])
        train = ManyLabels(references, references.astype(np.float64), np.full(len(labels), DEFAULT_THRESHOLD), labels)
        return Baseline([Constant(describe(one), partial(predict, one)) for one in candidates], train, counts)

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`labels`, the predicted ones; and `probabilities`, by label, which are independent of each other."""
        return {"labels": pa.list_(pa.string()), "probabilities": probability_type(labels)}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        rows = probabilities(logits_of(predictions, len(labels))).tolist()
        return [
            {"labels": [labels[index] for index in indices], "probabilities": dict(zip(labels, row, strict=True))}
            for indices, row in zip(predictions["prediction"].to_pylist(), rows, strict=True)
        ]

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The labels with their probabilities, the likeliest first, predicted ones marked with an asterisk."""
        ordered = sorted(record["probabilities"].items(), key=lambda item: -item[1])
        return [f"{p:6.1%}  {label}{' *' * (label in record['labels'])}" for label, p in ordered]

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the thresholds of a model that is not trained yet: it may have those of an earlier training with other
        labels."""
        model.config.update({THRESHOLDS: [DEFAULT_THRESHOLD] * model.config.num_labels})

    def calibrate(self, predictions: pa.Table, labels: Sequence[str]) -> dict[str, Any]:
        """The thresholds."""
        found = self.metric_inputs(predictions, labels)
        columns = zip(found.probabilities.T, found.references.T, strict=True)
        return {THRESHOLDS: [best_threshold(given, has) for given, has in columns]}

    def remap_labels(self, predictions: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """Matches labels by name, with the model's own thresholds. A label that the model lacks gets probability 0;
        labels that only the model has are dropped, because probabilities are independent."""
        logits, thresholds = logits_of(predictions, len(theirs)), _thresholds(predictions)
        sources = {place: theirs.index(name) for place, name in enumerate(labels) if name in theirs}
        ordered = np.full((len(logits), len(labels)), -np.inf, dtype=np.float32)
        ordered[:, list(sources)] = logits[:, list(sources.values())]
        remapped = _table(
            ordered,
            [thresholds[sources[place]] if place in sources else DEFAULT_THRESHOLD for place in range(len(labels))],
        )
        return replace_columns(predictions, remapped).replace_schema_metadata(remapped.schema.metadata)


def binary_cross_entropy(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """() the mean over all rows and labels; logits (B, L), indices (B, P) of each row's labels, padded with -1."""
    import torch

    truths = truths_of(logits.shape[1], indices)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), truths.float())


def truths_of(size: int, indices: torch.Tensor) -> torch.Tensor:
    """(B, L) whether each row has each of `size` labels, from (B, P) indices, padded with -1."""
    import torch

    return (indices[:, :, None] == torch.arange(size, device=indices.device)).any(dim=1)


def probabilities(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """(N, L) the sigmoid of (N, L) logits."""
    with np.errstate(over="ignore"):  # the result, 0, is right
        return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))))


def best_threshold(given: npt.NDArray[np.float64], has: npt.NDArray[np.bool_]) -> float:
    """The threshold with the best F1 of a label, given the (N,) rows' probabilities and whether they have the label.

    It is midway between two neighbouring probabilities, or between the lowest and 0; of equally good ones the nearest
    to 0.5. 0.5 if no row has the label.
    """
    if not has.any():
        return DEFAULT_THRESHOLD
    rising, places = np.unique(given, return_inverse=True)
    taken, hits = (np.cumsum(np.bincount(places, weights)[::-1])[::-1] for weights in (None, has))
    f1 = 2 * hits / (taken + has.sum())  # by the smallest probability that is predicted
    below = np.concatenate([[0.0], rising[:-1]])
    middles = (below + rising) / 2
    middles = np.where(middles > below, middles, rising)  # adjacent floats have no number between them
    best = np.flatnonzero(f1 == f1.max())
    return float(middles[best[np.argmin(np.abs(middles[best] - DEFAULT_THRESHOLD))]])


def _table(logits: npt.NDArray[np.float32], thresholds: Sequence[float]) -> pa.RecordBatch:
    predicted = probabilities(logits) >= np.array(thresholds)
    predictions = list_column(np.nonzero(predicted)[1], predicted.sum(axis=1))
    found = pa.RecordBatch.from_pydict({"prediction": predictions, "logits": logits_column(logits)})
    return found.replace_schema_metadata({THRESHOLDS: json.dumps(list(thresholds))})


def _thresholds(predictions: pa.Table) -> list[float]:
    thresholds: list[float] = json.loads(predictions.schema.metadata[THRESHOLDS.encode()])
    return thresholds
