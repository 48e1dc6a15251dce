"""The loss of reward models: the log-likelihood of preferences by Bradley and Terry (1952), as TRL's RewardTrainer.

B pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class BradleyTerry:
    """The mean loss of pairs, (), of their rewards (B, 2), of the chosen and the rejected text.

    `facts` (B, 2 or 3) are the numbers of tokens of the answers, and the margin by which the chosen one should be
    ahead. Pairs without tokens of an answer do not count; 0 if there are no others.
    """

    center_rewards_coefficient: float
    """The weight of the squared sum of the two rewards, which keeps them near 0 (Eisenstein et al.,
    arXiv:2312.09244)."""

    def __call__(self, rewards: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        counts = (facts[:, :2] > 0).all(dim=1)
        rewards, facts = rewards[counts], facts[counts]
        if not len(rewards):
            return rewards.sum()
        difference = rewards[:, 0] - rewards[:, 1]
        if facts.shape[1] == 3:
            difference = difference - facts[:, 2]
        loss = -functional.logsigmoid(difference).mean()
        return loss + self.center_rewards_coefficient * (rewards.sum(dim=1) ** 2).mean()
