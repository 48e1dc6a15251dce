"""Losses of preference tuning, for pairs of a chosen and a rejected answer.

Names, defaults and formulas are those of TRL 1.16: DPOTrainer (dpo is its `sigmoid`; ipo, robust), ORPOTrainer (orpo)
and CPOTrainer (simpo, with cpo_alpha 0). A loss is the mean over the pairs of a batch, independent of micro-batches and
ranks. One part of one loss differs: the likelihood of the chosen text in orpo is a mean over the tokens of a
micro-batch in TRL, and here, as in the paper, a mean over the pairs of each pair's mean.

B pairs, T tokens of the longest text, V vocabulary. Of 2B texts, the B chosen ones are first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from training.batching.batches import IGNORED
from training.task_types.losses.token_likelihood import shift_labels
from training.tokenization.preference_rows import FACTS

PROBABILITY_ONE = -torch.finfo(torch.float32).eps
"""The largest log-probability in orpo's odds, which are infinite at 0."""


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities of B pairs of answers given their prompts, each (B,)."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    reference_chosen: torch.Tensor
    """Under the reference model; empty for losses without one."""
    reference_rejected: torch.Tensor
    chosen_text: torch.Tensor
    """The mean log-probability of a token of the prompt and the chosen answer; empty for losses without it."""


@dataclass(frozen=True)
class PreferenceLoss:
    """The mean loss of pairs, (), of the scores (B, 2 or 3) of `answer_scores` and the FACTS of pairs (B, 3 or 5).

    Pairs without tokens of an answer do not count; 0 if there are no others. The fields are options of the task type.
    """

    name: str
    beta: float
    label_smoothing: float
    simpo_gamma: float

    def __call__(self, scores: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        counts = (facts[:, :2] > 0).all(dim=1)
        scores, facts = scores[counts], facts[counts]
        if not len(scores):
            return scores.sum()
        fact = dict(zip(FACTS, facts.unbind(dim=1), strict=False))
        empty = scores.new_empty(0)
        pairs = Pairs(
            chosen=scores[:, 0],
            rejected=scores[:, 1],
            chosen_tokens=fact["chosen_tokens"],
            rejected_tokens=fact["rejected_tokens"],
            reference_chosen=fact.get("reference_chosen_logp", empty),
            reference_rejected=fact.get("reference_rejected_logp", empty),
            chosen_text=scores[:, 2] / (fact["chosen_length"] - 1) if scores.shape[1] == 3 else empty,
        )
        return LOSSES[self.name](pairs, self).mean()


def answer_scores(
    logits: torch.Tensor, input_ids: torch.Tensor, targets: torch.Tensor, facts: torch.Tensor, *, chosen_text: bool
) -> torch.Tensor:
    """(B, 2) float32: the log-probabilities of the chosen and of the rejected answers, the sums over their tokens. With
    `chosen_text` (B, 3): also those of the chosen texts, prompts included.

    `logits` are (2B, T, V), `input_ids` and `targets` (2B, T).
    """
    pairs, width = len(facts), logits.shape[1]
    labels = targets
    if chosen_text:
        places = torch.arange(width, device=facts.device)
        is_token = places < facts[:, FACTS.index("chosen_length"), None]
        labels = torch.cat([input_ids[:pairs].masked_fill(~is_token, IGNORED), targets[pairs:]])
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), shift_labels(labels).flatten(), ignore_index=IGNORED, reduction="none"
    ).view(2 * pairs, width)
    of_answers = -(losses * (shift_labels(targets) != IGNORED)).sum(dim=1)
    scores = list(of_answers.split(pairs))
    return torch.stack([*scores, -losses[:pairs].sum(dim=1)] if chosen_text else scores, dim=1)


def dpo(pairs: Pairs, settings: PreferenceLoss) -> torch.Tensor:
    """(B,) Direct preference optimization (Rafailov et al., arXiv:2305.18290)."""
    return -functional.logsigmoid(settings.beta * _margin(pairs))


def ipo(pairs: Pairs, settings: PreferenceLoss) -> torch.Tensor:
    """(B,) Identity preference optimization (Azar et al., arXiv:2310.12036), on means over tokens as in TRL."""
    chosen = (pairs.chosen - pairs.reference_chosen) / pairs.chosen_tokens
    rejected = (pairs.rejected - pairs.reference_rejected) / pairs.rejected_tokens
    return (chosen - rejected - 1 / (2 * settings.beta)) ** 2


def robust(pairs: Pairs, settings: PreferenceLoss) -> torch.Tensor:
    """(B,) DPO, unbiased if a share `label_smoothing` of the pairs is flipped (Chowdhury et al., arXiv:2403.00409)."""
    flipped, margin = settings.label_smoothing, settings.beta * _margin(pairs)
    clean = -(1 - flipped) * functional.logsigmoid(margin)
    return (clean + flipped * functional.logsigmoid(-margin)) / (1 - 2 * flipped)


def orpo(pairs: Pairs, settings: PreferenceLoss) -> torch.Tensor:
    """(B,) Odds ratio preference optimization (Hong et al., arXiv:2403.07691), with the likelihood of the prompt as in
    TRL."""
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    return -pairs.chosen_text - settings.beta * functional.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def simpo(pairs: Pairs, settings: PreferenceLoss) -> torch.Tensor:
    """(B,) Simple preference optimization (Meng et al., arXiv:2405.14734)."""
    margin = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return -functional.logsigmoid(settings.beta * margin - settings.simpo_gamma)


LOSSES: Mapping[str, Callable[[Pairs, PreferenceLoss], torch.Tensor]] = {
    "dpo": dpo,
    "ipo": ipo,
    "robust": robust,
    "orpo": orpo,
    "simpo": simpo,
}
"""The losses by the names of options.loss."""


def _margin(pairs: Pairs) -> torch.Tensor:
    return (pairs.chosen - pairs.reference_chosen) - (pairs.rejected - pairs.reference_rejected)


def _log_odds(logs: torch.Tensor) -> torch.Tensor:
    logs = logs.clamp(max=PROBABILITY_ONE)
    return logs - torch.log(-torch.expm1(logs))
