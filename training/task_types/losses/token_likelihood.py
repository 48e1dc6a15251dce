"""Cross entropy of tokens: the loss of language models, and its sums by row.

Labels are token ids, or IGNORED for tokens that are no targets. B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import torch
from torch.nn import functional

from training.batching.batches import IGNORED


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """(B, T) labels of the tokens to (B, T) labels of the next tokens, which a causal model predicts."""
    return functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


@dataclass(frozen=True)
class TokenLoss:
    """The mean cross entropy of all targets, (), of logits (B, T, V) and labels (B, T); 0 if there are no targets."""

    causal: bool
    """Whether the logits at a token are for the next token."""
    smoothing: float
    """label_smoothing_factor."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = shift_labels(labels) if self.causal else labels
        total = functional.cross_entropy(
            logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.smoothing,
            reduction="sum",
        )
        return total / (labels != IGNORED).sum().clamp(min=1)


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(B,) float32: the sums of the log-probabilities of each text's targets, from logits (B, T, V) of a causal model
    and labels (B, T)."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), shift_labels(labels).flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -losses.view(labels.shape).sum(dim=1)


def sums_by_row(logits: torch.Tensor, labels: torch.Tensor) -> pa.RecordBatch:
    """The sums of each row, from logits (B, T, V) and their labels (B, T): `loss`, the cross entropy of its targets
    (float64); `targets`, their number; `hits`, the number of targets with the largest logit (int64)."""
    is_target = labels != IGNORED
    sums = [_sums_of_row(*row) for row in zip(logits, labels, strict=True)]  # a row at a time: V is large
    losses, hits = (torch.stack(of_rows).cpu().numpy() for of_rows in zip(*sums, strict=True))
    return pa.RecordBatch.from_pydict({"loss": losses, "targets": is_target.sum(dim=1).cpu().numpy(), "hits": hits})


def _sums_of_row(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses = functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
    return losses.double().sum(), (logits.argmax(dim=-1) == labels).sum()
