"""The loss of a model that learns from the stored outputs of a teacher (Hinton et al., arXiv:1503.02531), and the form
in which a batch has them.

The labels of a batch with a teacher, float64, are the task type's labels, followed by the teacher's outputs in the last
dimension: (B, K + C), of words (B, T, 1 + C). A row or word without a label has nan in place of the labels, one without
the teacher's outputs nan in place of them. Batches of evaluations have the task type's labels alone, of another type
than float64: their loss is the ordinary one.

B rows of a batch, T tokens, C outputs of the model, K labels of a row (1, or for several labels the most of a row), W
targets: rows, or words with a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.nn import functional

from training.batching.batches import IGNORED, TokenRows
from training.batching.random_states import SeededBatch
from training.data.arrow_columns import flat_values, lists_like
from training.data.ipc_files import read_table
from training.task_types.losses import TEACHER
from training.task_types.losses.token_distillation import IDS, add_tokens

if TYPE_CHECKING:
    from training.task_types.task_type import Loss

LABELLED = "labelled"
WITH_TEACHER = torch.float64
"""The type of labels with a teacher's outputs, and of no others."""
Outputs = Literal["classes", "labels", "numbers"]
"""classes: logits of classes that exclude each other. labels: logits of labels, each with its own probability. numbers:
predictions."""


class AddTeacher:
    """The batches of a collator, whose labels get the teacher's outputs of their rows. Rows of evaluations have none,
    and their batches stay as they are. Raises RuntimeError if rows of a training batch have none."""

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]) -> None:
        self._collate = collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self._collate(rows)
        if TEACHER in rows[0] and "text_ids" in rows[0]:  # the vectors of the texts, (M, D)
            vectors = [row[TEACHER].reshape(len(row["text_ids"]), -1) for row in rows]
            batch[TEACHER] = torch.from_numpy(np.concatenate(vectors))
        elif TEACHER in rows[0]:
            batch["labels"] = add_outputs(batch["labels"], rows)
        elif IDS in rows[0]:
            batch["labels"] = add_tokens(batch["labels"], rows)
        elif isinstance(rows, SeededBatch):
            raise RuntimeError(f"the rows of a training batch have no outputs of the teacher, but {', '.join(rows[0])}")
        return batch


def add_outputs(labels: torch.Tensor, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """The labels (B,), (B, K) or of words (B, T), with the outputs of the teacher. A batch without any word that has a
    token has no outputs: (B, T, 1)."""
    if "first" not in rows[0]:
        outputs = torch.from_numpy(np.stack([row[TEACHER] for row in rows])).to(WITH_TEACHER)
        own = labels.to(WITH_TEACHER).view(len(rows), -1)
        if not own.shape[1]:  # no row has one of several labels
            own = torch.full((len(rows), 1), -1, dtype=WITH_TEACHER)
        own[_unlabelled(rows)] = math.nan
        return torch.cat([own, outputs], dim=1)
    of_words = [row[TEACHER].reshape(len(row["first"]), -1)[row["first"] >= 0] for row in rows if len(row["first"])]
    words = [outputs for outputs in of_words if len(outputs)]
    if not words:
        return labels[..., None].to(WITH_TEACHER)
    packed = torch.zeros((*labels.shape, 1 + words[0].shape[1]), dtype=WITH_TEACHER)
    packed[..., 0] = labels
    packed[..., 0][_unlabelled(rows)[:, None] & (labels != IGNORED)] = math.nan
    packed[labels != IGNORED, 1:] = torch.from_numpy(np.concatenate(words)).to(WITH_TEACHER)  # in the words' order
    return packed


def _unlabelled(rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """(B,) whether each row has no label."""
    return torch.tensor([not row.get(LABELLED, True) for row in rows])


def with_outputs(rows: TokenRows, file: Path) -> TokenRows:
    """The token rows with the column `teacher` of a file, which has a line for each row of the data."""
    outputs = read_table(file)[TEACHER]
    if "row" in rows.table.column_names:
        outputs = outputs.take(rows.table["row"])
    return TokenRows(rows.table.append_column(TEACHER, outputs))


def with_unlabelled(
    rows: TokenRows,
    tokens: Path,
    outputs: Path,
    is_sure: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.bool_]] | None,
) -> TokenRows:
    """The token rows, followed by those of a file without labels, with the teacher's outputs of another file.

    A column `labelled` is 0 for them, and their `label` means nothing. `is_sure` gets the outputs of all of them,
    (N, C), and chooses rows.
    """
    more = with_outputs(TokenRows(tokens), outputs).table
    if is_sure is not None:
        more = more.filter(pa.array(is_sure(np.stack(more[TEACHER].to_pylist()).astype(np.float64))))
    kind = rows.table.schema.field("label").type
    if not pa.types.is_list(kind):
        labels = pa.array(np.zeros(len(more)), kind)
    elif "first" in more.column_names:
        first = more["first"].combine_chunks()
        labels = lists_like(first, pa.array(np.zeros(len(flat_values(first))), kind.value_type)).cast(kind)
    else:
        labels = pa.array([[]] * len(more), kind)
    more = more.append_column("label", labels)
    tables = [
        table.append_column(LABELLED, pa.array(np.full(len(table), value, np.int8)))
        for table, value in ((rows.table, 1), (more, 0))
    ]
    return TokenRows(pa.concat_tables([tables[0], tables[1].select(tables[0].column_names).cast(tables[0].schema)]))


@dataclass(frozen=True)
class DistillationLoss:
    """The mean loss of a batch, (), of logits and labels as above:

        (1 - weight) · ordinary + weight · temperature² · teacher's part

    The teacher's part of a row is the cross entropy of the teacher's and the model's probabilities at the temperature:
    of classes one number, of labels the mean of their binary cross entropies. Of numbers it is the squared difference,
    without temperature. A row without a label has the teacher's part alone, one without the teacher's outputs the
    ordinary loss alone. Labels of another type than WITH_TEACHER, which evaluations have, have the ordinary loss.
    """

    ordinary: Loss
    """The mean of the rows that it gets."""
    outputs: Outputs
    temperature: float
    weight: float

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        size = logits.shape[-1]
        if labels.dtype != WITH_TEACHER:
            return self.ordinary(logits, labels)
        if labels.dim() == 3:
            is_target = labels[..., 0] != IGNORED
            logits, labels = logits[is_target], labels[is_target]
            if not len(logits):
                return logits.sum()
        if labels.dim() != 2 or labels.shape[1] <= size:
            raise ValueError(f"labels {tuple(labels.shape)} have no place for a teacher's {size} outputs of a row")
        logits, own, outputs = logits.float(), labels[:, :-size], labels[:, -size:].float()
        has_label, has_teacher = ~own[:, 0].isnan(), ~outputs[:, 0].isnan()
        total = logits.sum() * 0.0
        for rows, share in ((has_label & has_teacher, 1.0 - self.weight), (has_label & ~has_teacher, 1.0)):
            if share and (count := int(rows.sum())):
                total = total + share * count * self.ordinary(logits[rows], self._as_labels(own[rows]))
        if self.weight and has_teacher.any():
            total = total + self.weight * self._of_teacher(logits[has_teacher], outputs[has_teacher]).sum()
        return total / max(1, len(logits))

    def _as_labels(self, own: torch.Tensor) -> torch.Tensor:
        """The labels as the task type's collator makes them."""
        if self.outputs == "labels":
            return own.long()
        return own[:, 0].float() if self.outputs == "numbers" else own[:, 0].long()

    def _of_teacher(self, logits: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """(W,) the teacher's part of the loss."""
        if self.outputs == "numbers":
            return (logits - outputs).square().mean(dim=1)
        logits, outputs = logits / self.temperature, outputs / self.temperature
        if self.outputs == "classes":
            soft = functional.cross_entropy(logits, outputs.softmax(dim=1), reduction="none")
        else:
            soft = functional.binary_cross_entropy_with_logits(logits, outputs.sigmoid(), reduction="none").mean(dim=1)
        return soft * self.temperature**2


@dataclass(frozen=True)
class VectorDistillationLoss:
    """The mean loss of a batch, (), of embeddings with the teacher's vectors beside them, (M, 2 D), and facts of the
    rows, (B, F), as in embedding_loss.Texts:

        (1 - weight) · ordinary + weight · teacher's part

    The teacher's part of a row is the mean squared difference over its texts and the dimensions; if all rows have as
    many texts, that of MSELoss of sentence-transformers. Embeddings without vectors, (M, D), as evaluations have them,
    have the ordinary loss.
    """

    ordinary: Loss
    dimensions: int
    weight: float

    def __call__(self, embeddings: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        if embeddings.dim() < 2 or embeddings.shape[1] == self.dimensions:
            return self.ordinary(embeddings, facts)
        with torch.autocast(embeddings.device.type, enabled=False):
            own, vectors = embeddings.float().split(self.dimensions, dim=1)
            counts = (facts[:, 1:] >= 0).sum(dim=1)
            of_text = (own - vectors).square().mean(dim=1) / counts.repeat_interleave(counts)
            total = self.weight * of_text.sum() / len(facts)
            return total + (1.0 - self.weight) * self.ordinary(own, facts) if self.weight < 1 else total
