"""Losses of embeddings, as in sentence-transformers 6.2, and their gradients over all rows of an optimizer step.

multiple_negatives_ranking and cosent compare each row with the others. Their batch is the whole optimizer step: with
several micro-batches, a first pass without gradients gives all embeddings, from which the loss and its gradient with
respect to each embedding are computed; the second pass of a micro-batch carries its gradients on to the weights
(GradCache, Gao et al., arXiv:2101.06983). With one micro-batch on each of several ranks, one pass is enough.

A text is never a negative of an anchor if it equals the anchor, its positive, or a positive of an equal anchor in the
step: such a candidate is left out of the loss.

R rows, M texts of all rows, D dimensions, C candidates (positives, then negatives), F facts of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn.functional import cosine_similarity, mse_loss, normalize, pairwise_distance, relu

from training.batching.batches import Batch

OF_WHOLE_STEP = ("multiple_negatives_ranking", "cosent")
"""The losses in which a row is compared with the other rows of its batch."""
GRADIENT, LOSS, SEED, SHARED = "step_gradient", "step_loss", "step_seed", "step_shared"
"""What a prepared micro-batch has beside its texts: the gradient of each embedding, the loss of the step and the seed
of its dropout; or that the other ranks have the other rows."""


@dataclass(frozen=True)
class Texts:
    """The embeddings of a batch, by their place in a row, and the numbers by which equal texts are known."""

    anchors: torch.Tensor  # (R, D)
    positives: torch.Tensor  # (R, D) or the second texts
    negatives: torch.Tensor  # (K, D)
    row_of_negative: torch.Tensor  # (K,)
    anchor_ids: torch.Tensor  # (R,)
    candidate_ids: torch.Tensor  # (C,)
    scores: torch.Tensor  # (R,) nan for rows without

    @classmethod
    def of(cls, embeddings: torch.Tensor, facts: torch.Tensor) -> Texts:
        """From the embeddings of the texts, row by row, (M, D), and the facts of the rows, (R, F): a score, then
        the number of each text, -1 where a row has fewer."""
        ids = facts[:, 1:]
        counts = (ids >= 0).sum(dim=1)
        starts = counts.cumsum(0) - counts
        place = torch.arange(len(embeddings), device=embeddings.device) - starts.repeat_interleave(counts)
        row = torch.arange(len(facts), device=embeddings.device).repeat_interleave(counts)
        flat, later = ids[ids >= 0], place > 1
        return cls(
            anchors=embeddings[starts],
            positives=embeddings[starts + 1],
            negatives=embeddings[later],
            row_of_negative=row[later],
            anchor_ids=flat[starts],
            candidate_ids=torch.cat([flat[starts + 1], flat[later]]),
            scores=facts[:, 0],
        )


@dataclass(frozen=True)
class EmbeddingLoss:
    """The loss, (), of embeddings (M, D) and facts (R, F), as in Texts. The fields are options of the task types. A
    loss that `forward` has computed, (), is returned unchanged."""

    loss: str
    scale: float = 20.0
    symmetric: bool = False
    margin: float | None = None
    distance_metric: str = "cosine"
    matryoshka_dims: Sequence[int] = ()
    matryoshka_weights: Sequence[float] = ()

    def __call__(self, embeddings: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        if not embeddings.dim():
            return embeddings
        loss = getattr(self, f"_{self.loss}")
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings = embeddings.float()
            if not self.matryoshka_dims:
                return torch.as_tensor(loss(Texts.of(embeddings, facts)))
            weights = self.matryoshka_weights or [1.0] * len(self.matryoshka_dims)
            return torch.stack(
                [
                    weight * loss(Texts.of(normalize(embeddings[:, :size], dim=1), facts))
                    for size, weight in zip(self.matryoshka_dims, weights, strict=True)
                ]
            ).sum()

    def _multiple_negatives_ranking(self, texts: Texts) -> torch.Tensor:
        rows = torch.arange(len(texts.anchors), device=texts.anchors.device)
        candidates = torch.cat([texts.positives, texts.negatives])
        scores = self.scale * normalize(texts.anchors, dim=1) @ normalize(candidates, dim=1).T  # (R, C)
        scores = scores.masked_fill(_false_negatives(texts), -torch.inf)
        log_sums = scores.logsumexp(dim=1)
        if self.symmetric:  # of each positive over all anchors
            log_sums = (log_sums + scores[:, : len(rows)].logsumexp(dim=0)) / 2
        return (log_sums - scores[rows, rows]).mean()

    def _cosent(self, texts: Texts) -> torch.Tensor:
        scores, order = texts.scores.sort()
        # Not more than the sum over all pairs with different scores, without their matrix: of each row, those that
        # should be more similar begin at the next larger score.
        similar = self.scale * cosine_similarity(texts.anchors, texts.positives)[order]
        sums = torch.cat([(-similar).flip(0).logcumsumexp(0).flip(0), similar.new_full((1,), -torch.inf)])
        exponents = similar + sums[torch.searchsorted(scores, scores, right=True)]
        return torch.cat([exponents, exponents.new_zeros(1)]).logsumexp(dim=0)

    def _cosine_similarity(self, texts: Texts) -> torch.Tensor:
        return mse_loss(cosine_similarity(texts.anchors, texts.positives), texts.scores.float())

    def _contrastive(self, texts: Texts) -> torch.Tensor:
        distances, similar = self._distances(texts.anchors, texts.positives), texts.scores.float()
        apart = relu(self._margin(0.5) - distances).square()
        return (similar * distances.square() + (1 - similar) * apart).mean() / 2

    def _triplet(self, texts: Texts) -> torch.Tensor:
        """The mean over the negatives of a row, then over the rows."""
        rows = texts.row_of_negative
        near = self._distances(texts.anchors, texts.positives)[rows]
        far = self._distances(texts.anchors[rows], texts.negatives)
        counts = torch.bincount(rows, minlength=len(texts.anchors))
        return (relu(near - far + self._margin(5.0)) / counts[rows]).sum() / len(texts.anchors)

    def _margin(self, default: float) -> float:
        return default if self.margin is None else self.margin

    def _distances(self, some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        if self.distance_metric == "cosine":
            return 1 - cosine_similarity(some, others)
        return pairwise_distance(some, others, p=2 if self.distance_metric == "euclidean" else 1)


def _false_negatives(texts: Texts) -> torch.Tensor:
    """(R, C) whether a candidate is not a negative of an anchor although it is not the anchor's own positive."""
    rows, positives = len(texts.anchors), texts.candidate_ids[: len(texts.anchors)]
    matching = positives[:, None] == texts.candidate_ids  # (R, C) equal to the row's positive
    _, group, sizes = texts.anchor_ids.unique(return_inverse=True, return_counts=True)
    for number in torch.nonzero(sizes > 1).flatten():
        equal = group == number
        matching[equal] = matching[equal].any(dim=0)
    matching |= texts.anchor_ids[:, None] == texts.candidate_ids
    own = torch.arange(rows, device=matching.device)
    matching[own, own] = False
    return matching


Embed = Callable[[Any, Batch], torch.Tensor]
"""The embeddings of a batch's texts, (M, D), by a model."""


def cache_gradients(
    embed: Embed, loss: EmbeddingLoss, model: Any, batches: Sequence[Batch], gather: Callable[[Any], list[Any]]
) -> list[Batch]:
    """The micro-batches of a rank as `step_loss` reads them. `gather` returns a value of every rank."""
    if len(batches) == 1:
        several = len(gather(None)) > 1
        return [{**batches[0], SHARED: torch.ones((), dtype=torch.int64)} if several else batches[0]]
    seeds = torch.randint(2**62, (len(batches),)).tolist()
    own = []
    for batch, seed in zip(batches, seeds, strict=True):
        with torch.no_grad(), same_dropout(seed, batch["labels"].device):
            own.append(embed(model, batch).float())
    embeddings = torch.cat(own).requires_grad_()
    facts = _stack([batch["labels"] for batch in batches])
    with torch.enable_grad():
        whole, rows = _of_all_ranks(loss, embeddings, facts, gather)
        (gradient,) = torch.autograd.grad(whole, embeddings)
    sizes = [len(part) for part in own]
    return [
        {
            **batch,
            GRADIENT: part * (rows / len(batch["labels"])),
            LOSS: whole.detach(),
            SEED: torch.tensor(seed),
        }
        for batch, part, seed in zip(batches, gradient.split(sizes), seeds, strict=True)
    ]


def step_loss(embed: Embed, loss: EmbeddingLoss, model: Any, batch: Batch) -> torch.Tensor:
    """The loss of the whole step, (), for a micro-batch of `cache_gradients`. Its gradient is that of the micro-batch's
    own texts, divided by the micro-batch's share of the rows, by which engines weight it."""
    if SHARED in batch:
        whole, rows = _of_all_ranks(loss, embed(model, batch).float(), batch["labels"], _gather)
        return whole.detach() + (whole - whole.detach()) * (rows / len(batch["labels"]))
    with same_dropout(int(batch[SEED]), batch["labels"].device):
        embeddings = embed(model, batch).float()
    carried = (embeddings * batch[GRADIENT]).sum()
    return batch[LOSS] + carried - carried.detach()


def is_prepared(batch: Mapping[str, Any]) -> bool:
    """Whether a micro-batch is one of a step with several."""
    return GRADIENT in batch or SHARED in batch


def _of_all_ranks(
    loss: EmbeddingLoss, embeddings: torch.Tensor, facts: torch.Tensor, gather: Callable[[Any], list[Any]]
) -> tuple[torch.Tensor, int]:
    """The loss over the texts of all ranks, with a gradient for this rank's, and the number of rows."""
    device, parts = embeddings.device, gather((embeddings.detach().cpu(), facts.cpu()))
    everywhere = [part.to(device) for part, _ in parts]
    everywhere[distributed.get_rank() if len(parts) > 1 else 0] = embeddings
    all_facts = _stack([part.to(device) for _, part in parts])
    return loss(torch.cat(everywhere), all_facts), len(all_facts)


def _gather(value: Any) -> list[Any]:
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def _stack(facts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The facts of all rows, (R, F); F of the row with most texts."""
    width = max(part.shape[1] for part in facts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in facts])


@contextmanager
def same_dropout(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, dropout draws from this seed; afterwards the generators' states are restored."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
