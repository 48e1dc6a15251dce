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
NUMBERS, TEXTS, TOKENS, PAIRS, UNPAIRED = "numbers", "texts", "tokens", "pairs", "unpaired"
CONVERSATIONS, RANKINGS, CHOICES = "conversations", "rankings", "choices"
"""Types of predictions: each is a class in training/evaluation, which has it as `prediction_type`."""

RIGHT_OR_WRONG = (ONE_LABEL, MANY_LABELS, TAGS, PAIRS, UNPAIRED, CHOICES)
"""The types whose predictions are each right or wrong: their classes have `correct`."""


@dataclass(frozen=True)
class Metric:
    """The facts about a metric that a recipe is checked against. Its class describes its meaning."""

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
    parameters: Mapping[str, str | int | None] = field(default_factory=dict)
    """Attributes that its class is given, for a class of several metrics."""


def _metric(name: str, *prediction_types: str, **facts: Any) -> Metric:
    """A metric with one class for all of these types of predictions."""
    return Metric(dict.fromkeys(prediction_types, name), **facts)


def _average(score: str, average: str | None, *prediction_types: str, **facts: Any) -> Metric:
    """An average of a score: over the labels of rows, or over the types of spans."""
    classes = {kind: "labels:SpanAverage" if kind == TAGS else "labels:LabelAverage" for kind in prediction_types}
    return Metric(classes, parameters={"score": score, "average": average}, **facts)


def _bleu(tokenizer: str) -> Metric:
    return _metric("texts:Bleu", TEXTS, most=100, parameters={"tokenizer": tokenizer})


def _rankings(name: str) -> dict[str, Metric]:
    """A metric of the first documents of each query, for several numbers of documents; 10 is the usual one."""
    return {f"{name.lower()}_at_{k}": _metric(f"rankings:{name}", RANKINGS, parameters={"k": k}) for k in FIRST_RANKS}


_ERROR: dict[str, Any] = {"more_is_better": False, "most": None}
_CORRELATION: dict[str, Any] = {"least": -1, "constant_value": 0.0, "needs": {ONE_LABEL: "two", NUMBERS: "two"}}
_OF_SECOND: dict[str, Any] = {"needs": {ONE_LABEL: "second", TAGS: "two"}}  # of tags, one beside O
_REWARD: dict[str, Any] = {"least": None, "most": None}

FIRST_RANKS = (10, 1, 3, 5, 100)

METRICS: dict[str, Metric] = {
    "accuracy": Metric(
        {
            ONE_LABEL: "labels:Accuracy",
            MANY_LABELS: "labels:Accuracy",
            TAGS: "labels:TagAccuracy",
            PAIRS: "rewards:PreferenceAccuracy",
            UNPAIRED: "rewards:UnpairedAccuracy",
            CHOICES: "labels:Accuracy",
        },
        within_label=True,
    ),
    "f1": _average("f1", None, ONE_LABEL, TAGS, **_OF_SECOND),
    "f1_macro": _average("f1", "macro", ONE_LABEL, MANY_LABELS, TAGS),
    "f1_micro": _average("f1", "micro", ONE_LABEL, MANY_LABELS, within_label=True),
    "f1_weighted": _average("f1", "weighted", ONE_LABEL, MANY_LABELS, TAGS),
    "f1_samples": _metric("labels:RowAverage", MANY_LABELS, parameters={"score": "f1"}),
    "precision": _average("precision", None, ONE_LABEL, TAGS, **_OF_SECOND),
    "precision_macro": _average("precision", "macro", ONE_LABEL, MANY_LABELS, TAGS),
    "precision_micro": _average("precision", "micro", ONE_LABEL, MANY_LABELS, within_label=True),
    "precision_weighted": _average("precision", "weighted", ONE_LABEL, MANY_LABELS, TAGS),
    "precision_samples": _metric("labels:RowAverage", MANY_LABELS, parameters={"score": "precision"}),
    "recall": _average("recall", None, ONE_LABEL, TAGS, **_OF_SECOND),
    "recall_macro": _average("recall", "macro", ONE_LABEL, MANY_LABELS, TAGS),
    "recall_micro": _average("recall", "micro", ONE_LABEL, MANY_LABELS, within_label=True),
    "recall_weighted": _average("recall", "weighted", ONE_LABEL, MANY_LABELS, TAGS, within_label=True),
    "recall_samples": _metric("labels:RowAverage", MANY_LABELS, parameters={"score": "recall"}),
    "matthews_correlation": _metric("labels:MatthewsCorrelation", ONE_LABEL, least=-1, needs={ONE_LABEL: "two"}),
    "roc_auc": Metric(
        {
            ONE_LABEL: "probabilities:RocAuc",
            MANY_LABELS: "probabilities:RocAuc",
            UNPAIRED: "rewards:RewardRocAuc",
        },
        needs={ONE_LABEL: "all", UNPAIRED: "two"},
    ),
    "log_loss": _metric("probabilities:LogLoss", ONE_LABEL, MANY_LABELS, CHOICES, within_label=True, **_ERROR),
    "calibration_error": _metric("probabilities:CalibrationError", ONE_LABEL, more_is_better=False),
    "hamming_loss": _metric("labels:HammingLoss", MANY_LABELS, more_is_better=False),
    "mse": _metric("numbers:Mse", ONE_LABEL, NUMBERS, numeric_labels=True, within_label=True, **_ERROR),
    "rmse": _metric("numbers:Rmse", NUMBERS, **_ERROR),
    "mae": _metric("numbers:Mae", ONE_LABEL, NUMBERS, numeric_labels=True, within_label=True, **_ERROR),
    "r2": _metric("numbers:R2", NUMBERS, least=None, needs={NUMBERS: "two"}),
    "pearson": _metric("numbers:Pearson", ONE_LABEL, NUMBERS, numeric_labels=True, **_CORRELATION),
    "spearman": _metric("numbers:Spearman", ONE_LABEL, NUMBERS, numeric_labels=True, **_CORRELATION),
    "bleu": _metric("texts:Bleu", TEXTS, most=100),
    "bleu_13a": _bleu("13a"),
    "bleu_intl": _bleu("intl"),
    "bleu_zh": _bleu("zh"),
    "bleu_char": _bleu("char"),
    "chrf": _metric("texts:Chrf", TEXTS, most=100),
    "rouge1": _metric("texts:Rouge1", TEXTS),
    "rouge2": _metric("texts:Rouge2", TEXTS),
    "rougeL": _metric("texts:RougeL", TEXTS),
    "exact_match": _metric("texts:ExactMatch", TEXTS),
    "perplexity": _metric("texts:Perplexity", TOKENS, CONVERSATIONS, least=1, **_ERROR),
    "token_accuracy": _metric("texts:TokenAccuracy", TOKENS, CONVERSATIONS),
    "tool_call_accuracy": _metric("tools:ToolCallAccuracy", CONVERSATIONS),
    "tool_name_accuracy": _metric("tools:ToolNameAccuracy", CONVERSATIONS),
    "tool_decision_accuracy": _metric("tools:ToolDecisionAccuracy", CONVERSATIONS),
    "valid_tool_calls": _metric("tools:ValidToolCalls", CONVERSATIONS, constant_value=0.0),
    "margin": Metric(
        {PAIRS: "rewards:Margin", UNPAIRED: "rewards:UnpairedMargin"},
        needs={UNPAIRED: "two"},
        **_REWARD,
    ),
    "chosen_reward": _metric("rewards:ChosenReward", PAIRS, **_REWARD),
    "rejected_reward": _metric("rewards:RejectedReward", PAIRS, more_is_better=False, **_REWARD),
    "chosen_length": _metric("rewards:ChosenLength", PAIRS, **_ERROR),
    "rejected_length": _metric("rewards:RejectedLength", PAIRS, **_ERROR),
    "longer_preferred": _metric("rewards:LongerPreferred", PAIRS, more_is_better=False),
    "desirable_reward": _metric("rewards:DesirableReward", UNPAIRED, **_REWARD),
    "undesirable_reward": _metric("rewards:UndesirableReward", UNPAIRED, more_is_better=False, **_REWARD),
    "completion_length": _metric("rewards:CompletionLength", UNPAIRED, **_ERROR),
    "kl": _metric("rewards:KlDivergence", UNPAIRED, **_ERROR),
    "generated_length": _metric("rewards:GeneratedLength", PAIRS, UNPAIRED, **_ERROR),
    "base_generated_length": _metric("rewards:BaseGeneratedLength", PAIRS, UNPAIRED, **_ERROR),
    **_rankings("Ndcg"),
    **_rankings("Mrr"),
    **_rankings("Recall"),
    **_rankings("Map"),
}
"""A metric's name in the recipe, and its entry. The first metric that fits a task type is its default."""


ANSWER_METRICS = ("generated_length", "base_generated_length")
"""Metrics of answers that the trained model and its base model generate for some prompts."""
VALID_CALLS = "valid_tool_calls"
TOOL_METRICS = ("tool_call_accuracy", "tool_name_accuracy", "tool_decision_accuracy", VALID_CALLS)
"""Metrics of answers that the trained model generates in rows with tools."""
WIN_RATE = "win_rate"
"""The figure of evaluation.judge: the share of prompts to which the model's answer is better than its opponent's."""


def metrics_for(prediction_type: str) -> tuple[str, ...]:
    """The metrics that are computed from predictions of this type."""
    return tuple(name for name, metric in METRICS.items() if prediction_type in metric.classes)


def metric_modules(names: Iterable[str], prediction_type: str | None) -> list[str]:
    """The modules that compute these metrics; user metrics are not among them."""
    classes = [METRICS[name].classes.get(prediction_type or "") for name in names if name in METRICS]
    return sorted({f"training.evaluation.metrics.{found.partition(':')[0]}" for found in classes if found})


def metric_libraries(names: Iterable[str]) -> tuple[str, ...]:
    """The distributions that only some metrics need, here for JSON Schema."""
    return ("jsonschema",) if {*names} & {*TOOL_METRICS} else ()


def entries(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The entries of these metrics as plain values, which stages have among their inputs; of user metrics the
    direction."""
    return {
        name: asdict(METRICS[name]) if name in METRICS else {"more_is_better": more_is_better(name)} for name in names
    }


def more_is_better(figure: str) -> bool:
    """Whether a higher value is better. For a figure outside the table: unless its name ends with `loss`."""
    return METRICS[figure].more_is_better if figure in METRICS else not figure.endswith("loss")


_FEWEST_ROWS = 20
"""With fewer rows, their labels say nothing about which of them is the frequent one."""


def metrics_of_second(names: Iterable[str]) -> list[str]:
    """Those of these metrics that are of the second label, where rows have one of two labels."""
    return [name for name in names if name in METRICS and METRICS[name].needs.get(ONE_LABEL) == "second"]


def frequent_positive(rows: Mapping[str, int]) -> str | None:
    """The message about metrics of the second of two labels if it is by far the more frequent one, as 'ok' is beside
    'fraud'; None otherwise. `rows` are counts of rows by label, in the order of the model's outputs."""
    if len(rows) != 2:
        return None
    (first, rare), (second, frequent) = rows.items()
    if not rare or frequent < 2 * rare or rare + frequent < _FEWEST_ROWS:
        return None
    share = f"{frequent:,} of {rare + frequent:,} rows"
    return f"computed for {second!r}, the label of {share}: for {first!r}, set data.label_names: [{second}, {first}]."


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
