"""Metrics of preferences.

of pairs               (N,) rewards of the chosen and the rejected answer, and their tokens
of rated completions   (N,) rewards, and whether each completion is desirable
of either              (N,) tokens of generated answers, nan for rows without one
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from datasets import Value
from sklearn.metrics import roc_auc_score

from training.evaluation.metrics.definition import FeatureMean, LabelMetric, MeanMetric, SumMetric, share, undefined
from training.evaluation.metrics.probabilities import RocCurve
from training.evaluation.predictions import Figure, Floats, Predictions
from training.evaluation.preferences import UnpairedPreferences

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


class BaseGeneratedLength(GeneratedLength):
    """The same of the base model, which training began with. From 0 up."""

    feature = "base_generated_tokens"


_RATED = {"rewards": Value("float64"), "desirable": Value("bool")}


class UnpairedAccuracy(MeanMetric):
    """The share of completions whose reward has the right sign: above 0 for desirable ones, which are then likelier
    than under the reference, and below 0 for undesirable ones. From 0 to 1."""

    _given: ClassVar[dict[str, Any]] = _RATED

    def of_rows(self, *_: Any, **inputs: Any) -> Floats:
        signs = np.where(inputs["desirable"], 1.0, -1.0)
        return np.asarray(signs * inputs["rewards"] > 0, np.float64)


class RewardRocAuc(LabelMetric):
    """How likely a desirable completion gets a higher reward than an undesirable one; equal rewards count half. It has
    no value where all completions have the same label. From 0 to 1, by scikit-learn's roc_auc_score."""

    _given: ClassVar[dict[str, Any]] = _RATED

    def _compute(self, *_: Any, **inputs: Any) -> dict[str, float]:
        desirable, rewards = np.asarray(inputs["desirable"], np.bool_), np.asarray(inputs["rewards"])
        if len(np.unique(desirable)) < 2 or not np.isfinite(rewards).all():
            return {self.name: math.nan}
        return {self.name: float(roc_auc_score(desirable, rewards))}

    def bootstrap_figure(self, predictions: Predictions) -> Figure | None:
        if not isinstance(predictions, UnpairedPreferences):
            return None
        finite = bool(np.isfinite(predictions.rewards).all())
        return RocCurve(predictions.rewards, predictions.desirable).area if finite else undefined


class _UnpairedMean(SumMetric):
    """A figure of the mean rewards of desirable and of undesirable completions; without a value where there are
    none."""

    _given: ClassVar[dict[str, Any]] = _RATED

    def statistics(self, *_: Any, **inputs: Any) -> Floats:
        desirable, rewards = np.asarray(inputs["desirable"], np.float64), np.asarray(inputs["rewards"])
        return np.stack([rewards * desirable, desirable, rewards * (1 - desirable), 1 - desirable], axis=1)

    def of_sums(self, sums: Floats) -> Floats:
        means = share(sums[:, [0, 2]], sums[:, [1, 3]])
        return self.of_means(means[:, 0], means[:, 1])

    def of_means(self, desirable: Floats, undesirable: Floats) -> Floats:
        raise NotImplementedError


class UnpairedMargin(_UnpairedMean):
    """The mean reward of the desirable completions less that of the undesirable ones. From minus infinity up, as TRL's
    rewards/margins."""

    def of_means(self, desirable: Floats, undesirable: Floats) -> Floats:
        return desirable - undesirable


class DesirableReward(_UnpairedMean):
    """The mean reward of the desirable completions: beta times their log-probability less that under the reference
    model. From minus infinity up, as TRL's rewards/chosen."""

    def of_means(self, desirable: Floats, undesirable: Floats) -> Floats:
        return desirable


class UndesirableReward(_UnpairedMean):
    """The mean reward of the undesirable completions. From minus infinity up, as TRL's rewards/rejected."""

    def of_means(self, desirable: Floats, undesirable: Floats) -> Floats:
        return undesirable


class CompletionLength(FeatureMean):
    """The mean number of tokens of the completions. From 0 up."""

    feature = "completion_tokens"


class KlDivergence(FeatureMean):
    """The estimated KL divergence of the model from its reference, in nats: the mean log-ratio of mismatched
    completions, at least 0. From 0 up, as TRL's kl."""

    feature = "mismatched_ratios"

    def of_sums(self, sums: Floats) -> Floats:
        return np.maximum(super().of_sums(sums), 0.0)
