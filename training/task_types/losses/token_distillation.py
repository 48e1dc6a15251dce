"""The loss of a language model that learns from a teacher's distribution of each target token, of which the K likeliest
tokens are stored, and the mass of all others as one.

Each divergence compares the distributions over these K tokens and the rest (K + 1 outcomes), p of the teacher and q of
the model, at the temperature:

    forward_kl   KL(p || q)
    reverse_kl   KL(q || p)
    jsd          beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q

reverse_kl leaves out outcomes that are impossible for the teacher (LEAST), for which it would be infinite; q is that of
the others. If all tokens of the teacher are stored, the rest is the rows of the vocabulary that only the model has.

With K = V they are those of the whole distributions, as TRL 1.16's GKDTrainer computes them (Agarwal et al.,
arXiv:2306.13649). With fewer, they are at most as large, because merging outcomes lowers a divergence. By the chain
rule they lack exactly this, with p' and q' the distributions within the rest, p_r and q_r its masses, and
m_r = beta p_r + (1 - beta) q_r:

    forward_kl   p_r KL(p' || q')
    reverse_kl   q_r KL(q' || p')
    jsd          m_r JSD(p' || q'), of beta p_r / m_r in place of beta, which is at most m_r log 2

KL(p' || q') is at most log(min(1, p_K / p_r)) + log(q_r / q_min), with p_K the least of the K probabilities, which none
of the rest exceeds, and q_min the model's least: the lack is bounded by the stored values. The gradient of forward_kl
by the logits, q - p, is exact at the K tokens, and p_r (q' - p') is missing at the others: at most 2 p_r in the sum of
its magnitudes.

The labels of a batch with a teacher, float64 (B, T, 2 + 2K), have for each token its id, or IGNORED, then the K ids,
their log-probabilities, and that of the rest.

B rows of a batch, T tokens, V vocabulary, N targets, K stored tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import torch

from training.batching.batches import IGNORED, TokenRows
from training.data.ipc_files import read_table

if TYPE_CHECKING:
    from training.task_types.task_type import Loss

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
IDS, LOGPS = "teacher_ids", "teacher_logps"
"""The columns of token rows with the teacher's K ids of each target, and its K + 1 log-probabilities, target after
target."""
LEAST = -1e4
"""The log-probability of impossible tokens, whose exponential is 0: the stored one of a rest that is empty."""
TARGETS_AT_ONCE = 256
"""The targets whose distributions are held at once; they do not change the result but for rounding."""


def top_tokens(logits: torch.Tensor, top_k: int, temperature: float, known: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids (N, K) of the likeliest tokens of each target, among the first `known` of the vocabulary, and their
    log-probabilities (N, K + 1), the last one that of the rest; from logits (N, V). K is `top_k`, or V if it is
    less."""
    found = []
    for part in logits.split(TARGETS_AT_ONCE):
        scaled = part.float() / temperature
        values, ids = scaled[:, :known].topk(min(top_k, known), dim=1)
        rest = scaled.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)  # (n, 1)
        logps = torch.cat([values, rest], dim=1) - scaled.logsumexp(1, keepdim=True)
        found.append((ids.int(), logps.clamp(min=LEAST)))
    ids, logps = (torch.cat(parts) for parts in zip(*found, strict=True))
    return ids, logps


def add_tokens(labels: torch.Tensor, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """The labels (B, T) with the stored tokens of their targets, as above."""
    is_target = labels != IGNORED
    count = max(1, int(is_target.sum()))
    ids, logps = (np.concatenate([row[name] for row in rows]).reshape(count, -1) for name in (IDS, LOGPS))
    packed = torch.zeros((*labels.shape, 1 + ids.shape[1] + logps.shape[1]), dtype=torch.float64)
    packed[..., 0] = labels
    if is_target.any():
        packed[is_target, 1:] = torch.from_numpy(np.concatenate([ids, logps], axis=1, dtype=np.float64))
    return packed


def with_tokens(rows: TokenRows, folder: Path) -> TokenRows:
    """The token rows with the columns IDS and LOGPS of the files in a folder, which have a line for each of them."""
    found = pa.concat_tables(read_table(file) for file in sorted(folder.iterdir()))
    return TokenRows(rows.table.append_column(IDS, found[IDS]).append_column(LOGPS, found[LOGPS]))


def token_labels(labels: torch.Tensor) -> torch.Tensor:
    """(B, T) int64: the ids of the targets, or IGNORED, of the labels of a batch with a teacher or without."""
    return labels if labels.dim() == 2 else labels[..., 0].long()


@dataclass(frozen=True)
class TokenDistillationLoss:
    """The mean loss of the targets of a batch, (), of logits (B, T, V) and labels as above:

        (1 - weight) · ordinary + weight · temperature² · divergence

    Labels (B, T), without a teacher, have the ordinary loss. The distributions are computed for TARGETS_AT_ONCE
    targets at a time, together with their gradient, so that beside the logits one tensor of their size is held.
    """

    ordinary: Loss
    """The mean of all targets, of logits and labels (B, T)."""
    causal: bool
    """Whether the logits at a token are for the next token."""
    divergence: Divergence
    beta: float
    temperature: float
    weight: float

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ids = token_labels(labels)
        if labels.dim() == 2 or not self.weight:
            return self.ordinary(logits, ids)
        if self.causal:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
        targets = labels.flatten(0, 1)
        places = (targets[:, 0] != IGNORED).nonzero().squeeze(1)  # (N,)
        size = (labels.shape[-1] - 2) // 2
        stored = targets[places, 1:].split([size, size + 1], dim=1)
        total: torch.Tensor = _SumInParts.apply(
            logits.flatten(0, 1), places, *stored, self.temperature, self.of_outcomes
        )
        found = self.weight * self.temperature**2 * total / max(1, len(places))
        return found if self.weight == 1 else found + (1 - self.weight) * self.ordinary(logits, ids)

    def of_outcomes(self, teacher: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
        """(N,) the divergence of each target, of the log-probabilities (N, C) of the teacher and of the model."""
        return divergence_of(self.divergence, self.beta, teacher, model)


def divergence_of(name: Divergence, beta: float, teacher: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """(N,) the divergence of log-probabilities (N, C)."""
    if name == "forward_kl":
        return _kl(teacher, model)
    if name == "reverse_kl":
        return _kl(model.masked_fill(teacher <= LEAST, LEAST).log_softmax(1), teacher)
    shares = torch.tensor([beta, 1 - beta], dtype=model.dtype, device=model.device).log()
    mixture = torch.logaddexp(teacher + shares[0], model + shares[1])
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(model, mixture)


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum(dim=1)


class _SumInParts(torch.autograd.Function):
    """The sum of a function of the K + 1 outcomes of some rows of logits. The gradient is computed with the sum, part
    by part: the logits of the rest have that of their sum, in the ratio of their probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        places: torch.Tensor,
        ids: torch.Tensor,
        logps: torch.Tensor,
        temperature: float,
        of_outcomes: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        gradient = torch.zeros_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        ids = ids.long()
        for part in range(0, len(places), TARGETS_AT_ONCE):
            rows, chosen = (given[part : part + TARGETS_AT_ONCE] for given in (places, ids))
            scaled = logits[rows].float() / temperature  # (n, V)
            values = scaled.gather(1, chosen)
            # Not 1 - the sum of the others, which rounds a small rest away.
            rest = scaled.scatter_(1, chosen, -torch.inf).logsumexp(1, keepdim=True).clamp(min=-torch.finfo().max)
            has_rest = chosen.shape[1] < scaled.shape[1]
            outcomes = torch.cat([values, rest], dim=1) if has_rest else values
            teacher = logps[part : part + TARGETS_AT_ONCE, : outcomes.shape[1]].to(outcomes.dtype)
            with torch.enable_grad():
                outcomes = outcomes.detach().requires_grad_()
                found = of_outcomes(teacher, outcomes.log_softmax(1)).sum()
            total += found.detach().double()
            if gradient is not None:
                (of_outcome,) = torch.autograd.grad(found, outcomes)
                scaled.sub_(rest).exp_().mul_(of_outcome[:, -1:])
                scaled.scatter_(1, chosen, of_outcome[:, : chosen.shape[1]])
                gradient[rows] = (scaled / temperature).to(gradient.dtype)
        ctx.gradient = gradient
        return total.float()

    @staticmethod
    def backward(ctx: Any, *of_sum: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(of_sum[0]), None, None, None, None, None
