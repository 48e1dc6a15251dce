"""Predictions and references of a split, a class for each type: the input of metrics. Those of texts, of words
and of preferences have modules of their own.

N rows, L labels, D bootstrap draws of the rows.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from training.recipe.tables.metrics import MANY_LABELS, NUMBERS, ONE_LABEL, TOKENS, non_numeric_label

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int32]  # (D, N) the number of times that each row counts in each draw
Figure = Callable[[Counts], Floats]
"""Returns the figure of each draw, (D,)."""
MAX_WORST_CASES = 20
"""The largest number of worst cases."""


class Predictions(ABC):
    """The references and a model's predictions for rows of one split."""

    prediction_type: ClassVar[str | None] = None
    """The key under which the table of metrics finds a metric's class; None for a user's class."""
    means: ClassVar[Sequence[str]] = ()
    """Names of metrics that replace the project's: each is the mean of the feature of the same name, (N,)."""

    @property
    def config_name(self) -> str:
        """The `config_name` of metrics, in terms of `evaluate`: binary, multiclass, …"""
        return "default"

    @property
    @abstractmethod
    def description(self) -> str:
        """The type in messages, such as "a regression"."""

    @abstractmethod
    def __len__(self) -> int:
        """N"""

    @abstractmethod
    def take(self, rows: Rows) -> Self:
        """These rows, in this order; a row may occur several times."""

    entries_name: ClassVar[Literal["rows", "queries"]] = "rows"
    """What the N entries are."""

    def rows_of(self, entries: Rows) -> Rows:
        """The rows of the split that these of the N entries are of. By default entry n is row n; an entry of several
        rows, such as a query, is of the first."""
        return entries

    @abstractmethod
    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """The values of a feature of `evaluate`, such as `predictions`, as this dtype, or if `listed` as lists of it;
        None if this class has no such feature.

        Raises ValueError with the reason if these rows have no such values.
        """

    row_score_name: ClassVar[str]
    """The name of `row_scores`."""

    @property
    @abstractmethod
    def row_scores(self) -> npt.NDArray[np.float64]:
        """(N,) a score of each prediction, higher is better: reports show the lowest, and the largest changes."""

    def scores_by(self, metric: str) -> npt.NDArray[np.float64]:
        """(N,) the scores by which two models' predictions of a row are compared if this metric compares the models."""
        return self.row_scores

    @property
    def correct(self) -> npt.NDArray[np.bool_] | None:
        """(N,) whether each prediction is right; None if right and wrong have no meaning for this type."""
        return None

    correct_metric: ClassVar[str | None] = None
    """The metric that is the share of `correct` rows, if there is one."""

    @property
    def codes(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """References and predictions of each row or word as comparable values; None if there are none."""
        return None

    def incomparable_reason(self, other: Self) -> str | None:
        """The reason why figures of two models are not comparable, in words that follow their names; else None."""
        return None

    def concatenate(self, other: Self) -> Self:
        """These rows, then the other's: a dataclass's fields with N values are concatenated, other fields are this
        object's. A class with fields of other lengths overrides this."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        arrays = {
            name: np.concatenate([value, getattr(other, name)])
            for name, value in values.items()
            if isinstance(value, np.ndarray) and len(value) == len(self)
        }
        return type(self)(**values | arrays)

    def worst_cases(self, other: Self) -> tuple[Self, Self]:
        """Returns (G,) predictions of this model and of another for the same rows, G at least 1: worst cases for this
        model, which a significance test adds to the rows. By default the largest difference in `row_scores`, in favour
        of the other."""
        difference = self.row_scores - other.row_scores
        row = np.array([np.argmax(np.abs(np.where(np.isfinite(difference), difference, 0)))])
        return (other.take(row), self.take(row)) if difference[row[0]] > 0 else (self.take(row), other.take(row))

    @property
    def caveat(self) -> str | None:
        """A warning about all figures of these rows, if there is one."""
        return None

    @abstractmethod
    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row for reports: `label`, `prediction` and further facts. `inputs` are the model's inputs."""


@dataclass(frozen=True)
class OneLabel(Predictions):
    """One of the labels a row."""

    references: Rows  # (N,) true labels, as indices of `labels`
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
        """Label indices as integers, the labels' names as strings, or these names as floats. `prediction_scores` are
        the probabilities (N, L) if listed, else those of label 1 of two, (N,)."""
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
        """One row for each label that occurs: this model's prediction with the lowest probability of the label, and the
        other model's with the highest."""
        if not (np.isfinite(self.probabilities).all() and np.isfinite(other.probabilities).all()):
            return super().worst_cases(other)
        true = np.unique(self.references)
        least_likely, most_likely = (
            self.probabilities[:, true].argmin(axis=0),
            other.probabilities[:, true].argmax(axis=0),
        )
        return replace(self.take(least_likely), references=true), replace(other.take(most_likely), references=true)

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
        """The rows of each pair of a true and a predicted label, shared by the metrics that need them."""
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
    probabilities: npt.NDArray[np.float64]  # (N, L) independent of each other
    thresholds: npt.NDArray[np.float64]  # (L,) or (N, L) the probability from which a label is predicted
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
        """With thresholds of (N, L), because two models may have different ones."""
        thresholds = [np.broadcast_to(part.thresholds, part.probabilities.shape) for part in (self, other)]
        return ManyLabels(
            np.concatenate([self.references, other.references]),
            np.concatenate([self.probabilities, other.probabilities]),
            np.concatenate(thresholds),
            self.labels,
        )

    def worst_cases(self, other: ManyLabels) -> tuple[ManyLabels, ManyLabels]:
        """Rows of up to MAX_WORST_CASES different sets of labels, with this model's prediction that gives the set
        the lowest likelihood, and the other model's that gives it the highest."""
        if not (np.isfinite(self.probabilities).all() and np.isfinite(other.probabilities).all()):
            return super().worst_cases(other)
        true = np.unique(self.references, axis=0)
        true = true[np.linspace(0, len(true) - 1, min(len(true), MAX_WORST_CASES)).astype(np.int64)]
        losses = ([log_losses(part.probabilities, labels).sum(axis=1) for labels in true] for part in (self, other))
        own_losses, other_losses = (np.array(loss) for loss in losses)
        least_likely, most_likely = own_losses.argmax(axis=1), other_losses.argmin(axis=1)
        return replace(self.take(least_likely), references=true), replace(other.take(most_likely), references=true)

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """As lists of integers (N, L), 1 for a label of the row; `prediction_scores`: the probabilities (N, L)."""
        if not listed:
            return None
        if feature == "prediction_scores":
            return self.probabilities
        if feature not in ("predictions", "references") or not dtype.startswith("int"):
            return None
        return (self.predictions if feature == "predictions" else self.references).astype(np.int64)

    @property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """The sum of the labels' log losses, negated."""
        return -log_losses(self.probabilities, self.references).sum(axis=1)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """Whether exactly the row's labels are predicted."""
        return np.asarray((self.predictions == self.references).all(axis=1))

    @property
    def codes(self) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.object_]]:
        """The sets of labels, as bits."""
        reference_bits, prediction_bits = (np.packbits(has, axis=1) for has in (self.references, self.predictions))
        return np.array([row.tobytes() for row in reference_bits], object), np.array(
            [row.tobytes() for row in prediction_bits], object
        )

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "label": self._join_labels(self.references[row]),
            "prediction": self._join_labels(self.predictions[row]),
            "log_loss": round(-float(self.take(np.array([row])).row_scores[0]), 4),
        }

    def _join_labels(self, has_label: npt.NDArray[np.bool_]) -> str:
        return ", ".join(self.labels[place] for place in np.flatnonzero(has_label).tolist())


def log_losses(probabilities: npt.NDArray[np.float64], references: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """-ln of the probability of the truth, from the probability of a label and whether the row has it; of any shape.
    Probabilities are clipped to [eps, 1 - eps]."""
    true = np.where(references, probabilities, 1 - probabilities)
    eps = np.finfo(np.float64).eps
    return np.asarray(-np.log(np.clip(true, eps, 1 - eps)))


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
        """The numbers, as floats."""
        if listed or not dtype.startswith("float"):
            return None
        return {"predictions": self.predictions, "references": self.references}.get(feature)

    @property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """The absolute error, negated."""
        return -np.abs(self.predictions - self.references)

    @property
    def codes(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return self.references, self.predictions

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        label, prediction = float(self.references[row]), float(self.predictions[row])
        return {"label": label, "prediction": round(prediction, 4), "error": round(prediction - label, 4)}


@dataclass(frozen=True)
class Likelihoods(Predictions):
    """Log-likelihoods of each row's tokens under a language model."""

    loss: npt.NDArray[np.float64]  # (N,) sum of the targets' negative log-likelihoods
    targets: Rows  # (N,) number of a row's tokens that the model predicts
    hits: Rows  # (N,) number of targets that were the most likely token
    tokens: Rows | None = None  # (N,) number of a row's tokens; None if models are not compared

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
        """Without `tokens` if one of the two has none."""
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
        """A reason if the tokens differ: fewer tokens are harder to predict."""
        for own, others in ((self.tokens, other.tokens), (self.targets, other.targets)):
            if own is not None and others is not None and not np.array_equal(own, others):
                return f"tokenize these rows differently, into {own.sum():,} and {others.sum():,} tokens"
        return None

    @property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """The mean log-likelihood of the targets; 0 without targets."""
        return -self.loss / np.maximum(self.targets, 1)

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        perplexity = float(np.exp(-self.row_scores[row]))
        return {"label": f"{self.targets[row]} tokens", "prediction": f"perplexity {perplexity:.4g}"}


class Confusion:
    """The pairs of a true and a predicted label that occur, and the number of rows of each in each draw. K pairs."""

    def __init__(
        self, references: npt.NDArray[np.int64], predictions: npt.NDArray[np.int64], labels: Sequence[str]
    ) -> None:
        self.labels = labels
        codes = references * len(labels) + predictions
        self._order = np.argsort(codes, kind="stable")
        pairs, self._starts = np.unique(codes[self._order], return_index=True)
        self.true, self.predicted = np.divmod(pairs, len(labels))  # (K,) each
        self._last: tuple[weakref.ref[Counts], Floats] | None = None

    def rows(self, counts: Counts) -> Floats:
        """(D, K)"""
        if self._last is None or self._last[0]() is not counts:  # several metrics use the same counts
            rows = np.add.reduceat(np.take(counts, self._order, axis=1), self._starts, axis=1, dtype=np.int64)
            self._last = weakref.ref(counts), rows.astype(np.float64)
        return self._last[1]

    def by_label(self, counts: Counts) -> tuple[Floats, Floats, Floats]:
        """(D, L) rows with each label, rows predicted to have it, and rows of both."""
        rows, label = self.rows(counts), np.arange(len(self.labels))
        true, predicted = ((which[:, None] == label).astype(np.float64) for which in (self.true, self.predicted))
        return rows @ true, rows @ predicted, rows @ (true * predicted)
