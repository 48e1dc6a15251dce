"""Metrics of preferences: (N,) rewards of the chosen and the rejected answer of each pair, and their tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from datasets import Value

from training.evaluation.confusion import Floats
from training.evaluation.metrics.definition import MeanMetric

_REWARDS = {"chosen_rewards": Value("float64"), "rejected_rewards": Value("float64")}


class PreferenceAccuracy(MeanMetric):
    """The share of pairs whose chosen answer has the higher reward. A pair without tokens of an answer counts as wrong.
    From 0 to 1, as TRL's rewards/accuracies."""

    name = "accuracy"
    _given: ClassVar[dict[str, Any]] = _REWARDS

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        return np.asarray(inputs["chosen_rewards"] > inputs["rejected_rewards"], np.float64)


class Margin(MeanMetric):
    """The mean reward of the chosen answers less that of the rejected ones. From minus infinity up, as TRL's
    rewards/margins."""

    name = "margin"
    _given: ClassVar[dict[str, Any]] = _REWARDS

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        return np.asarray(inputs["chosen_rewards"] - inputs["rejected_rewards"], np.float64)


class _FieldMean(MeanMetric):
    """The mean of one field of the pairs."""

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        (feature,) = self._given
        return np.asarray(inputs[feature], np.float64)


class ChosenReward(_FieldMean):
    """The mean reward of the chosen answers: beta times their log-probability less that under the reference model. For
    a loss without a reference, beta times the mean log-probability of their tokens. From minus infinity up, as TRL's
    rewards/chosen."""

    name = "chosen_reward"
    _given: ClassVar[dict[str, Any]] = {"chosen_rewards": Value("float64")}


class RejectedReward(_FieldMean):
    """The mean reward of the rejected answers. From minus infinity up, as TRL's rewards/rejected."""

    name = "rejected_reward"
    _given: ClassVar[dict[str, Any]] = {"rejected_rewards": Value("float64")}


class ChosenLength(_FieldMean):
    """The mean number of tokens of the chosen answers. From 0 up."""

    name = "chosen_length"
    _given: ClassVar[dict[str, Any]] = {"chosen_tokens": Value("int64")}


class RejectedLength(_FieldMean):
    """The mean number of tokens of the rejected answers. From 0 up."""

    name = "rejected_length"
    _given: ClassVar[dict[str, Any]] = {"rejected_tokens": Value("int64")}


class LongerPreferred(MeanMetric):
    """The share of pairs in which the longer answer has the higher reward, of answers of equal length a half. Above the
    share of pairs whose chosen answer is longer, the model prefers length itself. From 0 to 1."""

    name = "longer_preferred"
    _given: ClassVar[dict[str, Any]] = {
        **_REWARDS,
        "chosen_tokens": Value("int64"),
        "rejected_tokens": Value("int64"),
    }

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        longer = np.sign(inputs["chosen_tokens"] - inputs["rejected_tokens"])
        preferred = np.sign(inputs["chosen_rewards"] - inputs["rejected_rewards"])
        return np.asarray((1 + longer * preferred) / 2, np.float64)
