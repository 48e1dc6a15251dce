"""Losses of embeddings, as in sentence-transformers 6.2, and their gradients over all rows of an optimizer step.

The losses of OF_WHOLE_STEP compare each row with the others. Their batch is the whole optimizer step: with
several micro-batches, a first pass without gradients gives all embeddings, from which the loss and its gradient with
respect to each embedding are computed; the second pass of a micro-batch carries its gradients on to the weights
(GradCache, Gao et al., arXiv:2101.06983). With one micro-batch on each of several ranks, one pass is enough.

A text is never a negative of an anchor if it equals the anchor, its positive, or a positive of an equal anchor in the
step: such a candidate is left out of the loss. Of texts with labels, those with the anchor's label are no negatives.

R rows, M texts of all rows, D dimensions, C candidates (positives, then negatives), F facts of a row, A anchors of a
block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import distributed
from torch.nn.functional import cosine_similarity, mse_loss, normalize, pad, pairwise_distance, relu, softplus
from torch.utils.checkpoint import checkpoint

from training.batching.batches import Batch
from training.task_types.losses import LossOfLabels

OF_LABELS = get_args(LossOfLabels)
OF_WHOLE_STEP = ("multiple_negatives_ranking", "cosent", *OF_LABELS)
"""The losses in which a row is compared with the other rows of its batch."""
MAX_SCORES = 2**24
"""Scores of anchors and candidates in memory at a time. More are computed in blocks of anchors, and once more for the
gradient."""
SORTED = 4
"""The memory of distances that are sorted, as a multiple of theirs."""
GRADIENT, LOSS, SEED, SHARED = "step_gradient", "step_loss", "step_seed", "step_shared"
"""What a prepared micro-batch has beside its texts: the gradient of each embedding, the loss of the step and the seed
of its dropout; or that the other ranks have the other rows."""
ADDED = (GRADIENT, LOSS, SEED, SHARED)


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
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings = embeddings.float()
            if not self.matryoshka_dims:
                return torch.as_tensor(self._of_batch(embeddings, facts))
            weights = self.matryoshka_weights or [1.0] * len(self.matryoshka_dims)
            return torch.stack(
                [
                    weight * self._of_batch(normalize(embeddings[:, :size], dim=1), facts)
                    for size, weight in zip(self.matryoshka_dims, weights, strict=True)
                ]
            ).sum()

    def _of_batch(self, embeddings: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """() of embeddings of any length."""
        loss: Callable[..., torch.Tensor] = getattr(self, f"_{self.loss}")
        return loss(embeddings, facts[:, 0]) if self.loss in OF_LABELS else loss(Texts.of(embeddings, facts))

    def _multiple_negatives_ranking(self, texts: Texts) -> torch.Tensor:
        rows, device = len(texts.anchors), texts.anchors.device
        anchors = self.scale * normalize(texts.anchors, dim=1)
        candidates = normalize(torch.cat([texts.positives, texts.negatives]), dim=1).T

        def of_anchors(first: int, last: int) -> tuple[torch.Tensor, ...]:
            own = torch.arange(first, last, device=device)
            scores = anchors[first:last] @ candidates  # (A, C)
            scores = scores.masked_fill(_false_negatives(texts, own), -torch.inf)
            found = scores.logsumexp(dim=1), scores[own - first, own]
            if not self.symmetric:
                return found
            of_positives = scores[:, :rows]
            nothing = of_positives.isneginf().all(dim=0)  # for which logsumexp has no gradient
            return *found, of_positives.masked_fill(nothing, 0.0).logsumexp(dim=0).masked_fill(nothing, -torch.inf)

        blocks = _by_blocks(of_anchors, rows, candidates.shape[1])
        log_sums, own_scores = (torch.cat(parts) for parts in blocks[:2])
        if self.symmetric:  # of each positive over all anchors
            log_sums = (log_sums + torch.stack(blocks[2]).logsumexp(dim=0)) / 2
        return (log_sums - own_scores).mean()

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

    # Texts with labels: embeddings (R, D), labels (R,)

    def _batch_all_triplet(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean over the triplets with a loss, from each anchor's negatives in the order of their distances: of the
        triplets with one positive, those with the nearest negatives have a loss."""

        def of_anchors(first: int, last: int) -> tuple[torch.Tensor, ...]:
            distances, positive, negative = self._to_all(embeddings, labels, first, last)
            nearest = distances.masked_fill(~negative, torch.inf).sort(dim=1).values.double()
            sums = pad(nearest.cumsum(dim=1), (1, 0))  # (A, R + 1) of the nearest ones, of none first
            limits = distances.double() + self._margin(5.0)
            counts = torch.searchsorted(nearest.detach(), limits.detach())
            losses = torch.where(positive, counts * limits - sums.gather(1, counts), 0.0)
            return losses.sum(dim=1), (counts * positive).sum(dim=1)

        losses, counts = (torch.cat(parts).sum() for parts in _by_blocks(of_anchors, len(labels), SORTED * len(labels)))
        return (losses / counts.clamp(min=1)).float()

    def _batch_hard_triplet(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return relu(self._hardest(embeddings, labels) + self._margin(5.0)).mean()

    def _batch_hard_soft_margin_triplet(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return softplus(self._hardest(embeddings, labels)).mean()

    def _hardest(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(R,) the distance of the farthest positive minus that of the nearest negative. Without a positive the former
        is 0; without a negative the latter is the largest distance."""

        def of_anchors(first: int, last: int) -> tuple[torch.Tensor, ...]:
            distances, positive, negative = self._to_all(embeddings, labels, first, last)
            farthest = distances.max(dim=1, keepdim=True).values
            nearest = (distances + farthest * ~negative).min(dim=1).values
            return ((distances * positive).max(dim=1).values - nearest,)

        ((*parts,),) = _by_blocks(of_anchors, len(labels), len(labels))
        return torch.cat(parts)

    def _batch_semi_hard_triplet(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean over pairs of equal labels: each with the nearest negative that is farther than the positive, else
        with the farthest negative."""

        def of_anchors(first: int, last: int) -> tuple[torch.Tensor, ...]:
            distances, positive, negative = self._to_all(embeddings, labels, first, last)
            nearest = distances.masked_fill(~negative, torch.inf).sort(dim=1, stable=True).values
            places = torch.searchsorted(nearest.detach(), distances.detach(), right=True)
            outside = nearest.gather(1, places.clamp(max=len(labels) - 1))
            least = distances.min(dim=1, keepdim=True).values
            inside = ((distances - least) * negative).max(dim=1, keepdim=True).values + least
            chosen = torch.where(outside.isfinite(), outside, inside)
            losses = relu(distances - chosen + self._margin(5.0)) * positive
            return losses.sum(dim=1), positive.sum(dim=1)

        losses, pairs = (torch.cat(parts).sum() for parts in _by_blocks(of_anchors, len(labels), SORTED * len(labels)))
        return losses / pairs.clamp(min=1)

    def _to_all(
        self, embeddings: torch.Tensor, labels: torch.Tensor, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(A, R) each, of the anchors from a first one to the one before a last one: the distances of all texts, and
        which of them are positives and negatives."""
        anchors = embeddings[first:last]
        if self.distance_metric == "cosine":
            distances = 1 - normalize(anchors, dim=1) @ normalize(embeddings, dim=1).T
        elif self.distance_metric == "manhattan":
            distances = torch.cdist(anchors, embeddings, p=1)
        else:
            squares = embeddings.square().sum(dim=1)
            distances = (squares[first:last, None] - 2 * anchors @ embeddings.T + squares).clamp(min=0)
            is_zero = distances == 0  # where the root has no gradient
            distances = distances.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)
        numbers = torch.arange(len(labels), device=labels.device)
        own = numbers[first:last, None] == numbers
        same = labels[first:last, None] == labels
        return distances.masked_fill(own, 0.0), same & ~own, ~same

    def _margin(self, default: float) -> float:
        return default if self.margin is None else self.margin

    def _distances(self, some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        if self.distance_metric == "cosine":
            return 1 - cosine_similarity(some, others)
        return pairwise_distance(some, others, p=2 if self.distance_metric == "euclidean" else 1)


def _false_negatives(texts: Texts, anchors: torch.Tensor) -> torch.Tensor:
    """(A, C) whether a candidate is not a negative of one of these anchors although it is not the anchor's own
    positive."""
    positives = texts.candidate_ids[: len(texts.anchors)]
    matching = positives[anchors, None] == texts.candidate_ids  # (A, C) equal to the row's positive
    _, group, sizes = texts.anchor_ids.unique(return_inverse=True, return_counts=True)
    of_block = group[anchors]
    for number in of_block[sizes[of_block] > 1].unique():
        of_group = positives[group == number, None] == texts.candidate_ids
        matching[of_block == number] = of_group.any(dim=0)
    matching |= texts.anchor_ids[anchors, None] == texts.candidate_ids
    matching[anchors - anchors[0], anchors] = False
    return matching


def _by_blocks(
    function: Callable[[int, int], tuple[torch.Tensor, ...]], anchors: int, candidates: int
) -> list[list[torch.Tensor]]:
    """The results of a function that takes a first anchor and the one after the last, for all anchors: of each result
    its parts, one for each block of anchors."""
    size = max(1, MAX_SCORES // max(1, candidates))
    if size >= anchors:
        return [[result] for result in function(0, anchors)]
    starts = range(0, anchors, size)
    blocks = [checkpoint(function, start, min(start + size, anchors), use_reentrant=False) for start in starts]
    return [list(parts) for parts in zip(*blocks, strict=True)]


Embed = Callable[[Any, Batch], torch.Tensor]
"""The embeddings of a batch's texts, (M, D), by a model."""
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The loss, (), of embeddings (M, D) and the facts of their rows, such as EmbeddingLoss."""


def cache_gradients(
    embed: Embed, loss: Loss, model: Any, batches: Sequence[Batch], gather: Callable[[Any], list[Any]]
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


def step_loss(embed: Embed, loss: Loss, model: Any, batch: Batch) -> torch.Tensor:
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
    loss: Loss, embeddings: torch.Tensor, facts: torch.Tensor, gather: Callable[[Any], list[Any]]
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
    """The facts of all rows, (R, F); F of the row with most texts, or 1 for facts (R,)."""
    facts = [part.reshape(len(part), -1) for part in facts]
    width = max(part.shape[1] for part in facts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in facts])


@contextmanager
def same_dropout(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, dropout draws from this seed; afterwards the generators' states are restored."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
