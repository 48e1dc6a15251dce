"""Losses of rerankers, as sentence-transformers 6.2's BinaryCrossEntropyLoss, MSELoss, ListNetLoss and LambdaLoss with
their defaults.

logits  (B, L) the scores of the documents of B queries, anything where a query has fewer than L
labels  (B, L) their relevance, nan there

Each loss is a mean over targets, which `targets` counts for each query: its documents; or for ListNet the query; or for
LambdaLoss the pairs of documents of which one is more relevant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

MU = 10.0
"""The weight of the bound by neighbouring ranks beside that of LambdaRank in LambdaLoss (NDCG-Loss2++)."""
LEAST_GAIN = 1e-10
"""Of a query, so that one without a relevant document has finite weights."""


def targets(loss: str, labels: torch.Tensor) -> torch.Tensor:
    """(B,) the targets of each query."""
    if loss == "list_net":
        return torch.ones(len(labels), dtype=torch.int64)
    if loss == "lambda":
        return (labels[:, :, None] > labels[:, None, :]).sum(dim=(1, 2))
    return (~labels.isnan()).sum(dim=1)


@dataclass(frozen=True)
class RankingLoss:
    """The mean loss of a batch, (), of logits and labels."""

    name: str
    pos_weight: float | None = None
    """The weight of label 1 in binary_cross_entropy; None: 1."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        there = ~labels.isnan()
        if self.name in ("list_net", "lambda"):
            return _LISTWISE[self.name](logits, labels, there)
        given, wanted = logits[there], labels[there]
        if self.name == "mse":
            return functional.mse_loss(given, wanted)
        weight = None if self.pos_weight is None else given.new_tensor(self.pos_weight)
        return functional.binary_cross_entropy_with_logits(given, wanted, pos_weight=weight)


def list_net(logits: torch.Tensor, labels: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The cross entropy between the softmax of a query's labels and that of its logits (Cao et al., 2007)."""
    expected = labels.masked_fill(~there, -math.inf).softmax(dim=1)
    likelihoods = logits.masked_fill(~there, -math.inf).log_softmax(dim=1).masked_fill(~there, 0.0)
    return -(expected * likelihoods).sum(dim=1).mean()


def lambda_loss(logits: torch.Tensor, labels: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The logistic loss of each pair of documents of which one is more relevant, weighted by what their exchange would
    change in nDCG: NDCG-Loss2++ of the LambdaLoss framework (Wang et al., 2018), in bits."""
    order = logits.masked_fill(~there, -math.inf).argsort(dim=1, descending=True)
    scores, relevance = (values.masked_fill(~there, 0.0).gather(1, order) for values in (logits, labels))
    there = there.gather(1, order)
    ranks = torch.arange(1, logits.shape[1] + 1, device=logits.device, dtype=logits.dtype)
    discounts = 1 / torch.log2(1 + ranks)  # (L,)
    gains = torch.where(there, 2 ** relevance.clamp(min=0) - 1, 0.0)
    best = (gains.sort(dim=1, descending=True).values * discounts).sum(dim=1, keepdim=True)
    gains = gains / best.clamp(min=LEAST_GAIN)
    apart = (ranks[:, None] - ranks[None, :]).abs()  # (L, L)
    neighbours = torch.where(apart > 0, 1 / torch.log2(1 + apart.clamp(min=1)) - 1 / torch.log2(2 + apart), 0.0)
    weights = MU * neighbours + (discounts[:, None] - discounts[None, :]).abs()
    weights = weights * (gains[:, :, None] - gains[:, None, :]).abs()
    pairs = there[:, :, None] & there[:, None, :] & (relevance[:, :, None] > relevance[:, None, :])
    losses = -weights * functional.logsigmoid(scores[:, :, None] - scores[:, None, :]) / math.log(2)
    return losses.masked_fill(~pairs, 0.0).sum() / pairs.sum().clamp(min=1)


_LISTWISE: Mapping[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "list_net": list_net,
    "lambda": lambda_loss,
}
