"""Metrics as `evaluate.Metric` classes that need no network: `evaluate.combine` takes them as they are.

A metric of your own is a class like these, named in the recipe by where it is: `my_metrics:ExactMatch`. It is made
with a `config_name` ("binary", "multiclass", "multilabel" or "regression"), and given what its features ask for:
`predictions` and `references` (label indices, or numbers), or `prediction_scores` (probabilities); LabelMetric,
ScoreMetric and NumberMetric are that already. Every number that it returns is kept under its name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from training.evaluation.hub_metrics import PREFIX
from training.evaluation.metrics import pinned
from training.evaluation.metrics.definition import (
    LabelMetric,
    NumberMetric,
    ScoreMetric,
    evaluate,
    inputs_of,
    mean_given,
    numbers_of,
    refused,
)
from training.evaluation.metrics.labels import (
    F1,
    Accuracy,
    F1Macro,
    F1Micro,
    F1Samples,
    F1Weighted,
    HammingLoss,
    MatthewsCorrelation,
    Precision,
    PrecisionMacro,
    PrecisionMicro,
    PrecisionSamples,
    PrecisionWeighted,
    Recall,
    RecallMacro,
    RecallMicro,
    RecallSamples,
    RecallWeighted,
)
from training.evaluation.metrics.likelihoods import Perplexity, TokenAccuracy
from training.evaluation.metrics.numbers import R2, Mae, Mse, Pearson, Rmse, Spearman
from training.evaluation.metrics.probabilities import CalibrationError, LogLoss, RocAuc
from training.evaluation.metrics.spans import OF_TAGS
from training.evaluation.metrics.texts import OF_TEXTS
from training.evaluation.predictions import Predictions
from training.evaluation.tagged_words import Tagged
from training.jobs.user_code import Place
from training.problems import Problem, UserError, nearest

__all__ = ["METRICS", "OF_TAGS", "LabelMetric", "NumberMetric", "ScoreMetric", "compute", "computed", "make"]

METRICS: dict[str, type[evaluate.Metric]] = {
    "accuracy": Accuracy,
    "f1": F1,
    "f1_macro": F1Macro,
    "f1_micro": F1Micro,
    "f1_weighted": F1Weighted,
    "f1_samples": F1Samples,
    "precision": Precision,
    "precision_macro": PrecisionMacro,
    "precision_micro": PrecisionMicro,
    "precision_weighted": PrecisionWeighted,
    "precision_samples": PrecisionSamples,
    "recall": Recall,
    "recall_macro": RecallMacro,
    "recall_micro": RecallMicro,
    "recall_weighted": RecallWeighted,
    "recall_samples": RecallSamples,
    "matthews_correlation": MatthewsCorrelation,
    "roc_auc": RocAuc,
    "pearson": Pearson,
    "spearman": Spearman,
    "r2": R2,
    "token_accuracy": TokenAccuracy,
    **OF_TEXTS,
    "log_loss": LogLoss,
    "calibration_error": CalibrationError,
    "hamming_loss": HammingLoss,
    "mse": Mse,
    "rmse": Rmse,
    "mae": Mae,
    "perplexity": Perplexity,
}
"""A metric's name in the recipe, and its class; those of words' tags are OF_TAGS."""


def compute(names: Sequence[str], predicted: Predictions) -> dict[str, float]:
    """The named metrics of predicted rows; nan where one has no value for such rows. Raises UserError as `make` does,
    and where one of the user's gives no numbers."""
    return computed(make(names, predicted), predicted)


def computed(metrics: Mapping[str, evaluate.Metric], predicted: Predictions) -> dict[str, float]:
    """The same by metrics that `make` has made for such rows: once, where there are many groups of them."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        values |= numbers_of(name, metric._compute(**inputs_of(name, metric, predicted)))
    return values


def make(names: Sequence[str], predicted: Predictions) -> dict[str, evaluate.Metric]:
    """The metrics by their names: one of METRICS, `module:Class` or `hub:owner/name@COMMIT`.

    Raises UserError naming all that cannot be found, made, or used with rows such as these.
    """
    nobody = predicted.take(np.empty(0, np.int64))
    made: dict[str, evaluate.Metric] = {}
    problems: list[Problem] = []
    with tempfile.TemporaryDirectory() as scratch:  # evaluate makes a folder a metric, used or not
        for index, name in enumerate(names):
            try:
                found = _class(name, predicted)
                made[name] = found(config_name=predicted.config_name, keep_in_memory=True, cache_dir=scratch)
                inputs_of(name, made[name], nobody)
            except UserError as error:
                where = f"evaluation.metrics[{index}]"
                problems += (problem.model_copy(update={"where": where}) for problem in error.problems)
    if problems:
        raise UserError(problems)
    return made


def known(predicted: Predictions) -> Mapping[str, type[evaluate.Metric]]:
    """The project's metrics of such rows: a name may mean another class for another sort of answer."""
    if predicted.means:
        return {name: mean_given(name) for name in predicted.means}
    return OF_TAGS if isinstance(predicted, Tagged) else METRICS


def _class(name: str, predicted: Predictions) -> type[evaluate.Metric]:
    table = known(predicted)
    if name in table:
        return table[name]
    if name.startswith(PREFIX):
        return pinned.load(name)
    if ":" not in name:
        choices = f"choose from {', '.join(table)}, or name a class as module:Class"
        what = f"is not for {predicted.description}" if name in METRICS else "is unknown"
        raise refused(f"{name!r} {what}: {choices}.{nearest(name, table)}")
    found: type[evaluate.Metric] = _OWN.load(name)
    return found


_OWN = Place(
    kind="metrics",
    where="evaluation.metrics",
    example="my_metrics:ExactMatch",
    accepted="a subclass of evaluate.Metric",
    fits=lambda found: isinstance(found, type) and issubclass(found, evaluate.Metric),
)
