"""Metrics of preferences: (N,) rewards of the chosen and the rejected answer of each pair, and their tokens; and (N,)
tokens of generated answers, nan for rows without one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from datasets import Value

from training.evaluation.confusion import Floats
from training.evaluation.metrics.definition import FeatureMean, MeanMetric

_REWARDS = {"chosen_rewards": Value("float64"), "rejected_rewards": Value("float64")}


class PreferenceAccuracy(MeanMetric):
    """The share of pairs whose chosen answer has the higher reward. A pair without tokens of an answer counts as wrong.
    From 0 to 1, as TRL's rewards/accuracies."""

    _given: ClassVar[dict[str, Any]] = _REWARDS

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        return np.asarray(inputs["chosen_rewards"] > inputs["rejected_rewards"], np.float64)


class Margin(MeanMetric):
    """The mean reward of the chosen answers less that of the rejected ones. From minus infinity up, as TRL's
    rewards/margins."""

    _given: ClassVar[dict[str, Any]] = _REWARDS

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        return np.asarray(inputs["chosen_rewards"] - inputs["rejected_rewards"], np.float64)


class ChosenReward(FeatureMean):
    """The mean reward of the chosen answers: beta times their log-probability less that under the reference model. For
    a loss without a reference, beta times the mean log-probability of their tokens. From minus infinity up, as TRL's
    rewards/chosen."""

    feature = "chosen_rewards"


class RejectedReward(FeatureMean):
    """The mean reward of the rejected answers. From minus infinity up, as TRL's rewards/rejected."""

    feature = "rejected_rewards"


class ChosenLength(FeatureMean):
    """The mean number of tokens of the chosen answers. From 0 up."""

    feature = "chosen_tokens"


class RejectedLength(FeatureMean):
    """The mean number of tokens of the rejected answers. From 0 up."""

    feature = "rejected_tokens"


class LongerPreferred(MeanMetric):
    """The share of pairs in which the longer answer has the higher reward, of answers of equal length a half. Above the
    share of pairs whose chosen answer is longer, the model prefers length itself. From 0 to 1."""

    _given: ClassVar[dict[str, Any]] = {
        **_REWARDS,
        "chosen_tokens": Value("int64"),
        "rejected_tokens": Value("int64"),
    }

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        longer = np.sign(inputs["chosen_tokens"] - inputs["rejected_tokens"])
        preferred = np.sign(inputs["chosen_rewards"] - inputs["rejected_rewards"])
        return np.asarray((1 + longer * preferred) / 2, np.float64)


class GeneratedLength(FeatureMean):
    """The mean number of tokens of the answers that the trained model generates to options.answered_prompts prompts,
    end tokens included. It has no value without answers, as during training. From 0 up."""

    feature = "generated_tokens"

    def statistics(self, *_: Any, **inputs: Any) -> Floats:
        tokens = self.of_rows(**inputs)
        return np.stack([np.nan_to_num(tokens), np.isfinite(tokens).astype(np.float64)], axis=1)

    def of_sums(self, sums: Floats) -> Floats:
        return np.divide(sums[:, 0], sums[:, 1], out=np.full(len(sums), np.nan), where=sums[:, 1] > 0)


class BaseGeneratedLength(GeneratedLength):
    """The same of the base model, which training began with. From 0 up."""

    feature = "base_generated_tokens"
