"""Multi-label classification: any number of labels, or none, for a text or a pair of texts.

A row of the data set        {"text": "A gripping war film.", "label": ["war", "thriller"]}
becomes token features       {"input_ids": [101, 1037, ..., 102], "length": 8, "label": [4, 2]}
and, padded in a batch,      {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B, P)}, -1 where a row has fewer
the model outputs            logits (B, L), and the prediction is every label whose probability, the sigmoid of its
                             logit, is at least the label's threshold.

The loss is the mean binary cross entropy of all labels. The thresholds are in the model's config.json as `thresholds`,
in the order of the labels: 0.5 while it trains, then those with which the exported weights have the best F1 of each
label on the validation split.

B rows of a batch, N rows of a split, P labels of the row that has most, L labels, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from training.recipe.tables.metrics import MANY_LABELS, metrics_for
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
    import torch
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.evaluation.constant_predictions import Baseline
    from training.evaluation.predictions import ManyLabels, Predictions
    from training.recipe import Training
    from training.task_types.losses import Loss

THRESHOLDS = "thresholds"
"""The name of the thresholds in the model's config and in the schema metadata of predictions (as JSON)."""
USUAL = 0.5
FREQUENT_SETS = 5
"""The number of frequent label sets that are tried as constant predictions."""


class MultiLabelClassification(SequenceLevelTask):
    """Any number of labels for each row."""

    pipeline = False  # the text-classification pipeline returns one label and has no thresholds
    card_sentence = "Gives a {text} any number of {labels}"
    columns: ClassVar = {**TEXTS, "label": Column("labels", may_be_empty=True)}
    prediction_type: ClassVar = MANY_LABELS
    metrics: ClassVar = metrics_for(MANY_LABELS)

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """The labels' names, and any number of labels for each row."""
        return {**label_names_config(labels), "problem_type": "multi_label_classification"}

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss:
        """The loss that models compute inside, but from indices of labels, padded with -1."""
        return binary_cross_entropy

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, the indices of the labels above the model's thresholds, and `logits`, a list of L."""
        logits = outputs["logits"].float().cpu().numpy()
        return _table(logits, getattr(model.config, THRESHOLDS, None) or [USUAL] * logits.shape[1])

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> ManyLabels:
        import numpy as np

        from training.evaluation.predictions import ManyLabels

        references = np.zeros((len(predictions), len(labels)), dtype=np.bool_)
        places = predictions["label"].combine_chunks()
        references[np.repeat(np.arange(len(places)), places.value_lengths()), places.flatten()] = True
        return ManyLabels(
            references, probabilities(logits_of(predictions, len(labels))), np.array(_thresholds(predictions)), labels
        )

    def empty_predictions(self, labels: Sequence[str]) -> ManyLabels:
        import numpy as np

        from training.evaluation.predictions import ManyLabels

        none = np.empty((0, len(labels)))
        return ManyLabels(none.astype(np.bool_), none, np.full(len(labels), USUAL), labels)

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The same labels for every row, with the frequencies of the training labels as probabilities.

        The candidates are the most frequent label sets, the k most frequent labels for small k, the labels of more than
        half of the rows, and all labels.
        """
        from collections import Counter
        from dataclasses import replace
        from functools import partial

        import numpy as np

        from training.evaluation.constant_predictions import MOST_CONSTANTS, Baseline, Constant, column, quoted
        from training.evaluation.predictions import ManyLabels

        sets = Counter(tuple(sorted(row)) for row in column(data / "train.arrow", "label").to_pylist())
        references, counts = np.zeros((len(sets), len(labels)), np.bool_), np.fromiter(sets.values(), np.int64)
        for has, places in zip(references, sets, strict=True):
            has[list(places)] = True
        of_label = counts @ references
        given = (of_label + 1) / (counts.sum() + 2)  # smoothed, with two outcomes for each label

        def answered(chosen: tuple[int, ...], rows: ManyLabels, split: str) -> ManyLabels:
            thresholds = np.where(np.isin(np.arange(len(labels)), chosen), 0.0, 2.0)  # 2.0 is above every probability
            return replace(rows, probabilities=np.broadcast_to(given, (len(rows), len(labels))), thresholds=thresholds)

        order = np.argsort(-of_label, kind="stable").tolist()
        sizes = [*range(min(MOST_CONSTANTS, len(labels))), int((of_label > counts.sum() / 2).sum()), len(labels)]
        frequent = [labels_of_rows for labels_of_rows, _ in sets.most_common(FREQUENT_SETS)]
        tried = dict.fromkeys([*frequent, *(tuple(sorted(order[:size])) for size in sizes)])
        named = {
            one: "no label"
            if not one
            else f"all {len(one)} labels"
            if len(one) == len(labels)
            else quoted([labels[place] for place in sorted(one, key=order.index)])
            for one in tried
        }
        train = ManyLabels(references, references.astype(np.float64), np.full(len(labels), USUAL), labels)
        return Baseline([Constant(name, partial(answered, one)) for one, name in named.items()], train, counts)

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`labels`, the predicted ones; and `probabilities`, one for each label, independent of each other."""
        import pyarrow as pa

        every = pa.struct([(label, pa.float64()) for label in labels])
        return {"labels": pa.list_(pa.string()), "probabilities": every}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        rows = probabilities(logits_of(predictions, len(labels))).tolist()
        return [
            {"labels": [labels[place] for place in places], "probabilities": dict(zip(labels, row, strict=True))}
            for places, row in zip(predictions["prediction"].to_pylist(), rows, strict=True)
        ]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares the probabilities alone: one may be on either side of its threshold."""
        return super().same_prediction(given["probabilities"], stored["probabilities"], tolerance)

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The labels with their probabilities, the likeliest first, predicted ones marked with an asterisk."""
        every = sorted(record["probabilities"].items(), key=lambda one: -one[1])
        return [f"{p:6.1%}  {label}{' *' * (label in record['labels'])}" for label, p in every]

    def calibrate(self, predicted: Predictions) -> dict[str, Any]:
        """The thresholds."""
        from training.evaluation.predictions import ManyLabels

        assert isinstance(predicted, ManyLabels)
        columns = zip(predicted.probabilities.T, predicted.references.T, strict=True)
        return {THRESHOLDS: [best_threshold(given, has) for given, has in columns]}

    def remap_labels(self, predictions: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """Matches labels by name, with the model's own thresholds. A label that the model lacks gets probability 0;
        labels that only the model has are dropped, because probabilities are independent."""
        import numpy as np

        logits, thresholds = logits_of(predictions, len(theirs)), _thresholds(predictions)
        sources = {place: theirs.index(name) for place, name in enumerate(labels) if name in theirs}
        ordered = np.full((len(logits), len(labels)), -np.inf, dtype=np.float32)
        ordered[:, list(sources)] = logits[:, list(sources.values())]
        own = [thresholds[sources[place]] if place in sources else USUAL for place in range(len(labels))]
        remapped = _table(ordered, own)
        return replaced(predictions, remapped).replace_schema_metadata(remapped.schema.metadata)


def binary_cross_entropy(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """() the mean over all rows and labels; logits (B, L), places (B, P) the indices of each row's labels, or -1."""
    import torch

    every = torch.arange(logits.shape[1], device=places.device)
    truths = (places[:, :, None] == every).any(dim=1)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), truths.float())


def probabilities(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """(N, L) the sigmoid of (N, L) logits."""
    import numpy as np

    with np.errstate(over="ignore"):  # overflow gives the right result, 0
        return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))))


def best_threshold(given: npt.NDArray[np.float64], has: npt.NDArray[np.bool_]) -> float:
    """The threshold of a label with the best F1 on rows with these probabilities, (N,), some of which have the label.

    It lies midway between two neighbouring probabilities, or between the lowest and 0. Of equally good thresholds the
    one nearest to 0.5 is returned; 0.5 if no row has the label.
    """
    import numpy as np

    if not has.any():
        return USUAL
    rising, places = np.unique(given, return_inverse=True)
    taken, hits = (np.cumsum(np.bincount(places, weights)[::-1])[::-1] for weights in (None, has))
    f1 = 2 * hits / (taken + has.sum())  # where each of the probabilities is the least that is taken
    below = np.concatenate([[0.0], rising[:-1]])
    middles = (below + rising) / 2
    middles = np.where(middles > below, middles, rising)  # there is none between a number and the next
    best = np.flatnonzero(f1 == f1.max())
    return float(middles[best[np.argmin(np.abs(middles[best] - USUAL))]])


def _table(logits: npt.NDArray[np.float32], thresholds: Sequence[float]) -> pa.RecordBatch:
    import numpy as np
    import pyarrow as pa

    said = probabilities(logits) >= np.array(thresholds)
    ends = np.concatenate([[0], np.cumsum(said.sum(axis=1))]).astype(np.int32)
    predictions = pa.ListArray.from_arrays(ends, np.nonzero(said)[1])
    found = pa.RecordBatch.from_pydict({"prediction": predictions, "logits": as_lists(logits)})
    return found.replace_schema_metadata({THRESHOLDS: json.dumps(list(thresholds))})


def _thresholds(predictions: pa.Table) -> list[float]:
    thresholds: list[float] = json.loads(predictions.schema.metadata[THRESHOLDS.encode()])
    return thresholds
