"""What metrics are computed from: the rows of a split, and what a model makes of them; a class for each sort of answer.

N rows, L labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from training.evaluation.bootstrap import Confusion
from training.recipe.tables.metrics import MANY_LABELS, NUMBERS, ONE_LABEL, TOKENS, non_numeric_label

Rows = npt.NDArray[np.int64]
MOST_GUARDS = 20
"""Worst cases that are tried where there may be many."""


class Predictions(ABC):
    """Rows of one split, and what a model makes of them."""

    prediction_type: ClassVar[str | None] = None
    """The type by which the table of metrics chooses a metric's class; None for a class outside this package."""
    means: ClassVar[Sequence[str]] = ()
    """Metrics of this class alone: each is the mean of the feature of that name, (N,), from `feature_values`. If there
    are any, a recipe can name no others of the project's."""

    @property
    def config_name(self) -> str:
        """What metrics are made for, in the words of `evaluate`: binary, multiclass, …"""
        return "default"

    @property
    @abstractmethod
    def description(self) -> str:
        """What it is, in words that follow "which"."""

    @abstractmethod
    def __len__(self) -> int:
        """N"""

    @abstractmethod
    def take(self, rows: Rows) -> Self:
        """These rows alone, in this order; a row may come several times."""

    @abstractmethod
    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """What this metric is given for a feature of `evaluate`, such as `predictions`, that asks for values of this
        type, or where `listed` for a list of them a row; None where there is no such thing.

        Raises ValueError, saying why, where there is, and not of these rows.
        """

    row_score_name: ClassVar[str]
    """What `row_scores` is called."""

    @property
    @abstractmethod
    def row_scores(self) -> npt.NDArray[np.float64]:
        """(N,) how good each answer is, more is better: the worst are shown, and those that got better or worse."""

    @property
    def correct(self) -> npt.NDArray[np.bool_] | None:
        """(N,) which answers are right; None where they are better or worse, but not right or wrong."""
        return None

    correct_metric: ClassVar[str | None] = None
    """The metric that is the share of `correct` rows, if one is."""

    @property
    def codes(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """What is true and what is predicted, of each row or word, equal where the answers are; None where there are no
        answers to compare."""
        return None

    def incomparable_reason(self, other: Self) -> str | None:
        """Why what metrics say of these rows and of another model's are not alike, in words that follow the names of
        both; None where they are."""
        return None

    def concatenate(self, other: Self) -> Self:
        """These rows, then the other's. Fields of a dataclass that are arrays of N are concatenated, the others are
        taken from here. A class with fields of other lengths defines its own."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        both = {name: (value, getattr(other, name)) for name, value in own.items()}
        added = {
            name: np.concatenate([first, second])
            for name, (first, second) in both.items()
            if isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and len(first) == len(self)
        }
        return type(self)(**own | added)

    def worst_cases(self, other: Self) -> tuple[Self, Self]:
        """(G,) rows of this model and of another on the same rows, G at least 1: worst cases for this one, which a test
        adds to the rows. By default the row with the largest difference in `row_scores`, in favour of the other model.
        """
        difference = self.row_scores - other.row_scores
        row = np.array([np.argmax(np.abs(np.where(np.isfinite(difference), difference, 0)))])
        return (other.take(row), self.take(row)) if difference[row[0]] > 0 else (self.take(row), other.take(row))

    @property
    def caveat(self) -> str | None:
        """What to know of all figures of these rows, in words; None where there is nothing."""
        return None

    @abstractmethod
    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row for people to read, given what the model is shown of it: its `label`, the `prediction`, and whatever
        tells more."""


@dataclass(frozen=True)
class OneLabel(Predictions):
    """One of the labels a row."""

    references: Rows  # (N,) true labels, as places among `labels`
    predictions: Rows  # (N,)
    probabilities: npt.NDArray[np.float64]  # (N, L) each row adds up to one
    labels: Sequence[str]

    prediction_type: ClassVar = ONE_LABEL
    row_score_name: ClassVar[str] = "probability_of_label"
    correct_metric: ClassVar[str | None] = "accuracy"

    @property
    def config_name(self) -> str:
        return "binary" if len(self.labels) == 2 else "multiclass"

    @property
    def description(self) -> str:
        return f"a classification with {len(self.labels)} labels"

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: Rows) -> OneLabel:
        return OneLabel(self.references[rows], self.predictions[rows], self.probabilities[rows], self.labels)

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """Label indices where a whole number is asked for, the labels' names where a text is, and these as numbers
        where a number is; of `prediction_scores` the probabilities (N, L), or (N,) that of label 1 where one a row is
        asked for."""
        if feature == "prediction_scores":
            binary = self.probabilities[:, 1] if len(self.labels) == 2 else None
            return self.probabilities if listed else binary
        if feature not in ("predictions", "references") or listed:
            return None
        indices = self.predictions if feature == "predictions" else self.references
        if dtype.startswith("float"):
            if message := non_numeric_label(metric, self.labels):
                raise ValueError(message)
            return np.array([float(label) for label in self.labels])[indices]
        return np.array(self.labels)[indices] if dtype == "string" else indices

    def worst_cases(self, other: OneLabel) -> tuple[OneLabel, OneLabel]:
        """A row of each label that occurs: this model answers as it does where it gives that label the least
        probability, the other model as it does where it gives that label the most."""
        if not (np.isfinite(self.probabilities).all() and np.isfinite(other.probabilities).all()):
            return super().worst_cases(other)
        true = np.unique(self.references)
        least, most = self.probabilities[:, true].argmin(axis=0), other.probabilities[:, true].argmax(axis=0)
        return replace(self.take(least), references=true), replace(other.take(most), references=true)

    @property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """The probability of the true label."""
        return self.probabilities[np.arange(len(self)), self.references]

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.predictions == self.references)

    @property
    def codes(self) -> tuple[Rows, Rows]:
        return self.references, self.predictions

    @cached_property
    def confusion(self) -> Confusion:
        """The rows of each pair of a true and a predicted label, shared by the metrics that are computed from them."""
        return Confusion(self.references, self.predictions, self.labels)

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        prediction = self.predictions[row]
        return {
            "label": self.labels[self.references[row]],
            "prediction": self.labels[prediction],
            "probability": round(float(self.probabilities[row, prediction]), 4),
        }


@dataclass(frozen=True)
class ManyLabels(Predictions):
    """Any number of the labels a row."""

    references: npt.NDArray[np.bool_]  # (N, L) whether the row has the label
    probabilities: npt.NDArray[np.float64]  # (N, L) each by itself
    thresholds: npt.NDArray[np.float64]  # (L,) or (N, L) the least probability with which a label is predicted
    labels: Sequence[str]

    prediction_type: ClassVar = MANY_LABELS
    row_score_name: ClassVar[str] = "neg_log_loss"
    correct_metric: ClassVar[str | None] = "accuracy"

    @property
    def predictions(self) -> npt.NDArray[np.bool_]:
        """(N, L)"""
        return np.asarray(self.probabilities >= self.thresholds)

    @property
    def config_name(self) -> str:
        return "multilabel"

    @property
    def description(self) -> str:
        return f"a classification with any number of {len(self.labels)} labels a row"

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: Rows) -> ManyLabels:
        thresholds = self.thresholds[rows] if self.thresholds.ndim == 2 else self.thresholds
        return ManyLabels(self.references[rows], self.probabilities[rows], thresholds, self.labels)

    def concatenate(self, other: ManyLabels) -> ManyLabels:
        """Two models may have thresholds of their own: (N, L) then."""
        thresholds = [np.broadcast_to(one.thresholds, one.probabilities.shape) for one in (self, other)]
        return ManyLabels(
            np.concatenate([self.references, other.references]),
            np.concatenate([self.probabilities, other.probabilities]),
            np.concatenate(thresholds),
            self.labels,
        )

    def worst_cases(self, other: ManyLabels) -> tuple[ManyLabels, ManyLabels]:
        """Rows of up to MOST_GUARDS different sets of labels: this model answers as it does where that set is least
        likely to it, the other model as it does where that set is most likely to it."""
        if not (np.isfinite(self.probabilities).all() and np.isfinite(other.probabilities).all()):
            return super().worst_cases(other)
        true = np.unique(self.references, axis=0)
        true = true[np.linspace(0, len(true) - 1, min(len(true), MOST_GUARDS)).astype(np.int64)]
        losses = ([log_losses(one.probabilities, labels).sum(axis=1) for labels in true] for one in (self, other))
        ours, theirs = (np.array(loss) for loss in losses)
        least, most = ours.argmax(axis=1), theirs.argmin(axis=1)
        return replace(self.take(least), references=true), replace(other.take(most), references=true)

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """Where lists of whole numbers are asked for, (N, L): 1 for the labels that the row has, 0 for the others; of
        `prediction_scores` the probabilities (N, L)."""
        if not listed:
            return None
        if feature == "prediction_scores":
            return self.probabilities
        if feature not in ("predictions", "references") or not dtype.startswith("int"):
            return None
        return (self.predictions if feature == "predictions" else self.references).astype(np.int64)

    @property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """The sum of the labels' log loss, less than zero."""
        return -log_losses(self.probabilities, self.references).sum(axis=1)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """Where all of the row's labels are predicted, and no other."""
        return np.asarray((self.predictions == self.references).all(axis=1))

    @property
    def codes(self) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.object_]]:
        """The sets of labels, as bits."""
        truth, given = (np.packbits(has, axis=1) for has in (self.references, self.predictions))
        return np.array([row.tobytes() for row in truth], object), np.array([row.tobytes() for row in given], object)

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "label": self._named(self.references[row]),
            "prediction": self._named(self.predictions[row]),
            "log_loss": round(-float(self.take(np.array([row])).row_scores[0]), 4),
        }

    def _named(self, has: npt.NDArray[np.bool_]) -> str:
        return ", ".join(self.labels[place] for place in np.flatnonzero(has).tolist())


def log_losses(probabilities: npt.NDArray[np.float64], references: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Of any shape: -ln of the probability of what is true, given that of a label and whether it is there. A
    probability of 0 counts as the least that is told apart from it."""
    true = np.where(references, probabilities, 1 - probabilities)
    least = np.finfo(np.float64).eps
    return np.asarray(-np.log(np.clip(true, least, 1 - least)))


@dataclass(frozen=True)
class Numbers(Predictions):
    """A number a row."""

    references: npt.NDArray[np.float64]  # (N,)
    predictions: npt.NDArray[np.float64]  # (N,)

    prediction_type: ClassVar = NUMBERS
    row_score_name: ClassVar[str] = "neg_absolute_error"

    @property
    def config_name(self) -> str:
        return "regression"

    @property
    def description(self) -> str:
        return "a regression"

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: Rows) -> Numbers:
        return Numbers(self.references[rows], self.predictions[rows])

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """The numbers, where numbers are asked for."""
        if listed or not dtype.startswith("float"):
            return None
        return {"predictions": self.predictions, "references": self.references}.get(feature)

    @property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """The absolute error, less than zero."""
        return -np.abs(self.predictions - self.references)

    @property
    def codes(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return self.references, self.predictions

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        label, prediction = float(self.references[row]), float(self.predictions[row])
        return {"label": label, "prediction": round(prediction, 4), "error": round(prediction - label, 4)}


@dataclass(frozen=True)
class Likelihoods(Predictions):
    """How likely the tokens of each row were to a language model."""

    loss: npt.NDArray[np.float64]  # (N,) the sum over targets of minus the logarithms of their probabilities
    targets: Rows  # (N,) how many of a row's tokens the model was asked for
    hits: Rows  # (N,) of how many of these no other token was likelier
    tokens: Rows | None = None  # (N,) how many tokens a row has; None where nobody compares

    prediction_type: ClassVar = TOKENS
    row_score_name: ClassVar[str] = "log_likelihood"

    @property
    def config_name(self) -> str:
        return "tokens"

    @property
    def description(self) -> str:
        return "a language model"

    def __len__(self) -> int:
        return len(self.loss)

    def concatenate(self, other: Likelihoods) -> Likelihoods:
        """Without `tokens` where one of the two lacks them."""
        if self.tokens is None or other.tokens is None:
            return super(Likelihoods, replace(self, tokens=None)).concatenate(replace(other, tokens=None))
        return super().concatenate(other)

    def take(self, rows: Rows) -> Likelihoods:
        tokens = None if self.tokens is None else self.tokens[rows]
        return Likelihoods(self.loss[rows], self.targets[rows], self.hits[rows], tokens)

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """`loss`, `targets` or `hits`."""
        values = {"loss": self.loss, "targets": self.targets, "hits": self.hits}
        return None if listed else values.get(feature)

    def incomparable_reason(self, other: Likelihoods) -> str | None:
        """They are alike by the same tokens only: fewer ones are harder to tell."""
        for ours, theirs in ((self.tokens, other.tokens), (self.targets, other.targets)):
            if ours is not None and theirs is not None and not np.array_equal(ours, theirs):
                return f"make other tokens of these rows, {ours.sum():,} and {theirs.sum():,} of them"
        return None

    @property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """The mean logarithm of the targets' probabilities; 0 where there are none."""
        return -self.loss / np.maximum(self.targets, 1)

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        perplexity = float(np.exp(-self.row_scores[row]))
        return {"label": f"{self.targets[row]} tokens", "prediction": f"perplexity {perplexity:.4g}"}
