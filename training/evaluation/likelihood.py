"""How likely a language model finds the tokens that it shall tell: the loss that it is trained by, and sums by row.

Labels are token ids, or IGNORED where there is nothing to tell. B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import torch
from torch.nn import functional

from training.batching.batches import IGNORED


def following(labels: torch.Tensor) -> torch.Tensor:
    """(B, T) labels of the tokens themselves to (B, T) those of the next ones, which a causal model tells."""
    return functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


@dataclass(frozen=True)
class TokenLoss:
    """Of logits (B, T, V) and labels (B, T), the mean cross entropy of all targets, (); 0 where there is none."""

    causal: bool
    """Whether a token's logits are for the next one."""
    smoothing: float
    """As `label_smoothing_factor` has it."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = following(labels) if self.causal else labels
        total = functional.cross_entropy(
            logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.smoothing,
            reduction="sum",
        )
        return total / (labels != IGNORED).sum().clamp(min=1)


def sums_of_rows(logits: torch.Tensor, labels: torch.Tensor) -> pa.RecordBatch:
    """Of logits (B, T, V) and the labels (B, T) that they are for, by row: `loss`, the sum of minus the logarithms of
    the targets' probabilities (float64); `targets`, how many there are, and `hits`, of how many no other token is
    likelier (int64)."""
    there = labels != IGNORED
    found = [_sums_of_row(*row) for row in zip(logits, labels, strict=True)]  # a row at a time: V is large
    losses, hits = (torch.stack(sums).cpu().numpy() for sums in zip(*found, strict=True))
    return pa.RecordBatch.from_pydict({"loss": losses, "targets": there.sum(dim=1).cpu().numpy(), "hits": hits})


def _sums_of_row(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses = functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
    return losses.double().sum(), (logits.argmax(dim=-1) == labels).sum()
