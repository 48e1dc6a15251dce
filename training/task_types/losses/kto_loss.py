"""The loss of KTO (Ethayarajh et al., arXiv:2402.01306), as TRL 1.16's KTOTrainer, for completions that are labelled
desirable or undesirable.

The KL divergence from the reference is one number for all rows of an optimizer step, over all micro-batches and ranks,
so that the loss does not depend on how a step is divided. TRL estimates it for each micro-batch.

B rows of a batch, T tokens of the longest text, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.tokenization.completion_rows import COMPLETION_TOKENS, FACTS, LABEL, REFERENCE

TOKENS, DESIRABLE, REFERENCE_LOGP, REFERENCE_MISMATCHED = map(FACTS.index, (COMPLETION_TOKENS, LABEL, *REFERENCE))
KL = len(FACTS)
"""The column of the KL divergence in `facts`, if the engine has computed it for the whole step."""


@dataclass(frozen=True)
class KtoLoss:
    """The mean loss of rows, (), of the log-probabilities of their completions, (B, 1), and their FACTS with the KL
    divergence, (B, 5). Without the latter, (B, 4), the scores also have those of the mismatched completions, (B, 2),
    and the batch's own divergence is used.

    Rows without tokens of their completion do not count; 0 if there are no others. The fields are options of the task
    type.
    """

    beta: float
    desirable_weight: float
    undesirable_weight: float

    def __call__(self, scores: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        counts = facts[:, TOKENS] > 0
        scores, facts = scores[counts], facts[counts]
        if not len(scores):
            return scores.sum()
        kl = facts[0, KL] if facts.shape[1] > KL else divergence(divergence_sums(scores[:, 1].detach(), facts))
        signs = 2 * facts[:, DESIRABLE] - 1  # 1 for desirable completions, else -1
        gains = signs * (scores[:, 0] - facts[:, REFERENCE_LOGP] - kl)
        weights = torch.where(signs > 0, self.desirable_weight, self.undesirable_weight)
        return (weights * (1 - torch.sigmoid(self.beta * gains))).mean()


def divergence_sums(mismatched: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
    """(2,) float64: the sum of the log-ratios of the mismatched completions over the rows that count, and their number.

    `mismatched` (B,) are their log-probabilities under the model.
    """
    counts = facts[:, TOKENS] > 0
    ratios = mismatched.double() - facts[:, REFERENCE_MISMATCHED].double()
    return torch.stack([(ratios * counts).sum(), counts.sum().double()])


def divergence(sums: torch.Tensor) -> torch.Tensor:
    """() float32: the estimate of the KL divergence, at least 0, from `divergence_sums` of all rows."""
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0).float()
