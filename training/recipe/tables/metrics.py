"""The project's metrics: an entry for each name that a recipe can use.

A metric is added by an entry here and a class in a module of training/evaluation/metrics. The metrics of a task type,
the bounds of the gate, the slices that a metric fits, the baseline's value and the reference page are derived from the
two. The table imports none of the classes, so that a recipe is checked in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ONE_LABEL, MANY_LABELS, TAGS = "one_label", "many_labels", "tags"
NUMBERS, TEXTS, TOKENS, PAIRS, RATED = "numbers", "texts", "tokens", "pairs", "rated"
"""Types of predictions: each is a class in training/evaluation, which has it as `prediction_type`."""


@dataclass(frozen=True)
class Metric:
    """The facts about a metric that a recipe is checked against. Its meaning is the docstring of its class."""

    classes: Mapping[str, str]
    """`module:Class` in training.evaluation.metrics, by the type of predictions that it is computed from."""
    more_is_better: bool = True
    least: float | None = 0
    """The lower end of its range; None: unbounded. `most` is the upper end."""
    most: float | None = 1
    numeric_labels: bool = False
    """Whether it reads the names of labels as numbers, such as ratings."""
    within_label: bool = False
    """Whether it has a meaning on rows that all have the same label. F1 does not (it is 0 on rows of label 0), nor do
    macro averages (they count labels without rows), correlations and roc_auc (they are undefined), and probabilities
    that are calibrated over all rows are not calibrated on those of one label."""
    needs: Mapping[str, Literal["all", "two", "second"]] = field(default_factory=dict)
    """The labels without which a split gives the metric no value, by the type of predictions: all of them; two
    different ones; or the label with index 1, if there are two."""
    constant_value: float | None = None
    """The value for predictions that are all equal, if the formula is undefined for them."""


def _metric(name: str, *prediction_types: str, **facts: Any) -> Metric:
    """A metric with one class for all of these types of predictions."""
    return Metric(dict.fromkeys(prediction_types, name), **facts)


_ERROR: dict[str, Any] = {"more_is_better": False, "most": None}
_CORRELATION: dict[str, Any] = {"least": -1, "constant_value": 0.0, "needs": {ONE_LABEL: "two", NUMBERS: "two"}}
_OF_SECOND: dict[str, Any] = {"needs": {ONE_LABEL: "second", TAGS: "two"}}  # of tags, one beside O
_REWARD: dict[str, Any] = {"least": None, "most": None}

METRICS: dict[str, Metric] = {
    "accuracy": Metric(
        {
            ONE_LABEL: "labels:Accuracy",
            MANY_LABELS: "labels:Accuracy",
            TAGS: "spans:TagAccuracy",
            PAIRS: "preferences:PreferenceAccuracy",
            RATED: "rated_completions:RatedAccuracy",
        },
        within_label=True,
    ),
    "f1": Metric({ONE_LABEL: "labels:F1", TAGS: "spans:SpanF1"}, **_OF_SECOND),
    "f1_macro": Metric({ONE_LABEL: "labels:F1Macro", MANY_LABELS: "labels:F1Macro", TAGS: "spans:SpanF1Macro"}),
    "f1_micro": _metric("labels:F1Micro", ONE_LABEL, MANY_LABELS, within_label=True),
    "f1_weighted": Metric(
        {ONE_LABEL: "labels:F1Weighted", MANY_LABELS: "labels:F1Weighted", TAGS: "spans:SpanF1Weighted"}
    ),
    "f1_samples": _metric("labels:F1Samples", MANY_LABELS),
    "precision": Metric({ONE_LABEL: "labels:Precision", TAGS: "spans:SpanPrecision"}, **_OF_SECOND),
    "precision_macro": Metric(
        {ONE_LABEL: "labels:PrecisionMacro", MANY_LABELS: "labels:PrecisionMacro", TAGS: "spans:SpanPrecisionMacro"}
    ),
    "precision_micro": _metric("labels:PrecisionMicro", ONE_LABEL, MANY_LABELS, within_label=True),
    "precision_weighted": Metric(
        {
            ONE_LABEL: "labels:PrecisionWeighted",
            MANY_LABELS: "labels:PrecisionWeighted",
            TAGS: "spans:SpanPrecisionWeighted",
        }
    ),
    "precision_samples": _metric("labels:PrecisionSamples", MANY_LABELS),
    "recall": Metric({ONE_LABEL: "labels:Recall", TAGS: "spans:SpanRecall"}, **_OF_SECOND),
    "recall_macro": Metric(
        {ONE_LABEL: "labels:RecallMacro", MANY_LABELS: "labels:RecallMacro", TAGS: "spans:SpanRecallMacro"}
    ),
    "recall_micro": _metric("labels:RecallMicro", ONE_LABEL, MANY_LABELS, within_label=True),
    "recall_weighted": Metric(
        {ONE_LABEL: "labels:RecallWeighted", MANY_LABELS: "labels:RecallWeighted", TAGS: "spans:SpanRecallWeighted"},
        within_label=True,
    ),
    "recall_samples": _metric("labels:RecallSamples", MANY_LABELS),
    "matthews_correlation": _metric("labels:MatthewsCorrelation", ONE_LABEL, least=-1, needs={ONE_LABEL: "two"}),
    "roc_auc": Metric(
        {
            ONE_LABEL: "probabilities:RocAuc",
            MANY_LABELS: "probabilities:RocAuc",
            RATED: "rated_completions:RewardRocAuc",
        },
        needs={ONE_LABEL: "all", RATED: "two"},
    ),
    "log_loss": _metric("probabilities:LogLoss", ONE_LABEL, MANY_LABELS, within_label=True, **_ERROR),
    "calibration_error": _metric("probabilities:CalibrationError", ONE_LABEL, more_is_better=False),
    "hamming_loss": _metric("labels:HammingLoss", MANY_LABELS, more_is_better=False),
    "mse": _metric("numbers:Mse", ONE_LABEL, NUMBERS, numeric_labels=True, within_label=True, **_ERROR),
    "rmse": _metric("numbers:Rmse", NUMBERS, **_ERROR),
    "mae": _metric("numbers:Mae", ONE_LABEL, NUMBERS, numeric_labels=True, within_label=True, **_ERROR),
    "r2": _metric("numbers:R2", NUMBERS, least=None, needs={NUMBERS: "two"}),
    "pearson": _metric("numbers:Pearson", ONE_LABEL, NUMBERS, numeric_labels=True, **_CORRELATION),
    "spearman": _metric("numbers:Spearman", ONE_LABEL, NUMBERS, numeric_labels=True, **_CORRELATION),
    "bleu": _metric("texts:Bleu", TEXTS, most=100),
    "bleu_13a": _metric("texts:Bleu13a", TEXTS, most=100),
    "bleu_intl": _metric("texts:BleuIntl", TEXTS, most=100),
    "bleu_zh": _metric("texts:BleuZh", TEXTS, most=100),
    "bleu_char": _metric("texts:BleuChar", TEXTS, most=100),
    "chrf": _metric("texts:Chrf", TEXTS, most=100),
    "rouge1": _metric("texts:Rouge1", TEXTS),
    "rouge2": _metric("texts:Rouge2", TEXTS),
    "rougeL": _metric("texts:RougeL", TEXTS),
    "exact_match": _metric("texts:ExactMatch", TEXTS),
    "perplexity": _metric("likelihoods:Perplexity", TOKENS, least=1, **_ERROR),
    "token_accuracy": _metric("likelihoods:TokenAccuracy", TOKENS),
    "margin": Metric(
        {PAIRS: "preferences:Margin", RATED: "rated_completions:RatedMargin"}, needs={RATED: "two"}, **_REWARD
    ),
    "chosen_reward": _metric("preferences:ChosenReward", PAIRS, **_REWARD),
    "rejected_reward": _metric("preferences:RejectedReward", PAIRS, more_is_better=False, **_REWARD),
    "chosen_length": _metric("preferences:ChosenLength", PAIRS, **_ERROR),
    "rejected_length": _metric("preferences:RejectedLength", PAIRS, **_ERROR),
    "longer_preferred": _metric("preferences:LongerPreferred", PAIRS, more_is_better=False),
    "desirable_reward": _metric("rated_completions:DesirableReward", RATED, **_REWARD),
    "undesirable_reward": _metric("rated_completions:UndesirableReward", RATED, more_is_better=False, **_REWARD),
    "completion_length": _metric("rated_completions:CompletionLength", RATED, **_ERROR),
    "kl": _metric("rated_completions:KlDivergence", RATED, **_ERROR),
    "generated_length": _metric("generated_answers:GeneratedLength", PAIRS, RATED, **_ERROR),
    "base_generated_length": _metric("generated_answers:BaseGeneratedLength", PAIRS, RATED, **_ERROR),
}
"""A metric's name in the recipe, and its entry. The first metric that fits a task type is its default."""


ANSWER_METRICS = ("generated_length", "base_generated_length")
"""Metrics of answers that the trained model and its base model generate for some prompts."""
WIN_RATE = "win_rate"
"""The figure of evaluation.judge: the share of prompts to which the model's answer is better than its opponent's."""


def metrics_for(prediction_type: str) -> tuple[str, ...]:
    """The metrics that are computed from predictions of this type."""
    return tuple(name for name, metric in METRICS.items() if prediction_type in metric.classes)


def metric_modules(names: Iterable[str], prediction_type: str | None) -> list[str]:
    """The modules that compute these metrics; user metrics are not among them."""
    classes = [METRICS[name].classes.get(prediction_type or "") for name in names if name in METRICS]
    return sorted({f"training.evaluation.metrics.{found.partition(':')[0]}" for found in classes if found})


def entries(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The entries of these metrics as plain values, which stages have among their inputs; of user metrics the
    direction."""
    return {
        name: asdict(METRICS[name]) if name in METRICS else {"more_is_better": more_is_better(name)} for name in names
    }


def more_is_better(figure: str) -> bool:
    """Whether a higher value is better. For a figure outside the table: unless its name ends with `loss`."""
    return METRICS[figure].more_is_better if figure in METRICS else not figure.endswith("loss")


def non_numeric_label(metric: str, labels: Iterable[str]) -> str | None:
    """The message about the first label that a metric of numbers cannot read; None if there is none."""
    strange = next((label for label in labels if not _is_number(label)), None)
    if strange is None:
        return None
    return (
        f"{metric!r} needs numbers, and the label {strange!r} is not one: choose another metric, or use labels such as "
        "1 to 5."
    )


def _is_number(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False
