"""The calibration of a registered version, as its file calibration.json has it, predictions by it, and its measures.
All that gives probabilities of a calibrated version computes them here: commands, batches, servers, and MLflow's.

Readers outside of this project: the logits of label i become scale[i] * logit + offset[i] (with one scale, it is that
of all labels); `softmax` or `sigmoid` of these are the probabilities.

N rows, L labels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_validator

from training.data.vectors import as_lists, as_matrix
from training.evaluation.abstention import Judged, needs_review
from training.evaluation.calibration import Logits, Scaling, calibration_error, log_softmax
from training.evaluation.predictions import Floats, ManyLabels, Mask, OneLabel
from training.jobs.protocol import Result
from training.problems import UserError, on_one_line

FILE = "calibration.json"
REVIEW, LABEL_SET = "review", "label_set"
"""Fields of a record: whether a person should look at the row, and the labels of its prediction set."""


class GivesRecords(Protocol):
    """The part of a task type that records depend on: see training.task_types.task_type."""

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]: ...

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]: ...


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Abstention(_Stored):
    """The probabilities from which predictions are answered, and what they promise."""

    max_error: float
    confidence: float
    thresholds: dict[str, float | None]
    """Of labels with a threshold of their own; null: no row with this prediction is answered."""
    others: float | None
    """Of all other predictions."""


class PredictionSets(_Stored):
    """The probability from which a label belongs to the set of a row."""

    coverage: float
    least_probability: float


class Calibration(_Stored):
    """The content of calibration.json."""

    function: Literal["softmax", "sigmoid"]
    """softmax: a row has one label; sigmoid: any number of them."""
    labels: list[str]
    """In the order of the logits."""
    scale: list[float]
    """Of each label, or one for all."""
    offset: list[float]
    abstain: Abstention | None = None
    prediction_sets: PredictionSets | None = None

    @model_validator(mode="after")
    def _has_a_value_for_each_label(self) -> Self:
        count = len(set(self.labels))
        if not count or count < len(self.labels) or not {len(self.scale), len(self.offset)} <= {1, count}:
            raise ValueError("labels are missing, repeated, or without a value")
        if self.abstain and not set(self.abstain.thresholds) <= set(self.labels):
            raise ValueError("there are thresholds of unknown labels")
        return self

    def require_labels(self, labels: Sequence[str]) -> None:
        """Raises UserError if the model has other labels: its predictions would have the names of these."""
        if self.labels != [*labels]:
            theirs, own = (on_one_line(", ".join(names))[:200] for names in (self.labels, labels))
            message = f"is of the labels {theirs}, and the model has {own}: restore it, or use another version."
            raise UserError.of("registry", FILE, message)

    def text(self) -> str:
        """The content of the file, and of a version's tag."""
        return json.dumps(self.model_dump(mode="json"), ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Calibration:
        """The calibration in the file of a folder."""
        return cls.model_validate_json((folder / FILE).read_bytes())

    def write(self, folder: Path) -> None:
        """Writes the file into a folder."""
        (folder / FILE).write_text(self.text(), encoding="utf-8")

    def probabilities(self, logits: Logits) -> Floats:
        """(N, L) the calibrated probabilities of (N, L) logits."""
        scaled = self._scaling.apply(logits)
        if self.function == "softmax":
            return np.asarray(np.exp(log_softmax(scaled)))
        with np.errstate(over="ignore"):  # the result, 0, is right
            return np.asarray(1 / (1 + np.exp(-scaled)))

    def rescale(self, predictions: pa.Table) -> pa.Table:
        """The predictions of a task type, with logits whose probabilities are the calibrated ones. The predicted labels
        stay as they are."""
        scaled = self._scaling.apply(read_logits(predictions, len(self.labels)))
        return predictions.set_column(predictions.column_names.index("logits"), "logits", as_lists(scaled))

    def judge(self, predictions: pa.Table, right: npt.NDArray[np.bool_] | None = None) -> Judged:
        """The probability of each row's prediction, and whether it is right; without `right`, no row is."""
        given = self.probabilities(read_logits(predictions, len(self.labels)))
        right = np.zeros(len(predictions), np.bool_) if right is None else right
        chosen = predictions["prediction"].combine_chunks()
        if self.function == "softmax":
            label = chosen.to_numpy()
            return Judged(given[np.arange(len(given)), label], label, right)
        has = np.zeros(given.shape, np.bool_)
        has[np.repeat(np.arange(len(chosen)), chosen.value_lengths()), chosen.flatten()] = True
        return Judged(np.where(has, given, 1 - given).prod(axis=1), np.zeros(len(given), np.int64), right)

    def outcomes(self, predictions: pa.Table, predicted: OneLabel | ManyLabels) -> tuple[Floats, Mask]:
        """Probabilities, and whether what they are of is true: the predicted label of each row, or where rows have any
        number of labels each label of each row. `predicted`: the task type's `metric_inputs` of the predictions."""
        if isinstance(predicted, OneLabel):
            judged = self.judge(predictions, predicted.correct)
            return judged.probability, judged.right
        probabilities = self.probabilities(read_logits(predictions, len(self.labels)))
        return probabilities.ravel(), predicted.references.ravel()

    def measure(self, predictions: pa.Table, predicted: OneLabel | ManyLabels) -> MeasuredConfidence:
        """The calibration error of these rows, and the errors among answered ones."""
        error = calibration_error(*self.outcomes(predictions, predicted))
        if self.abstain is None:
            return MeasuredConfidence(calibration_error=error)
        judged = self.judge(predictions, predicted.correct)
        answered = ~self.review(judged)
        wrong = float((~judged.right[answered]).mean()) if answered.any() else None
        return MeasuredConfidence(
            calibration_error=error, answered=float(answered.mean()), error=wrong, max_error=self.abstain.max_error
        )

    def record_types(self, task_type: GivesRecords) -> dict[str, pa.DataType]:
        """The names and types of a record's fields."""
        return {
            **task_type.record_types(self.labels),
            **({REVIEW: pa.bool_()} if self.abstain else {}),
            **({LABEL_SET: pa.list_(pa.string())} if self.prediction_sets else {}),
        }

    def to_records(self, task_type: GivesRecords, predictions: pa.Table) -> list[dict[str, Any]]:
        """The task type's records with calibrated probabilities, `review` and `label_set`."""
        records = task_type.to_records(self.rescale(predictions), self.labels)
        if self.abstain:
            judged = self.judge(predictions)
            for record, review in zip(records, self.review(judged).tolist(), strict=True):
                record[REVIEW] = review
        if self.prediction_sets:
            sets = self.label_sets(self.probabilities(read_logits(predictions, len(self.labels))))
            for record, labels in zip(records, sets, strict=True):
                record[LABEL_SET] = labels
        return records

    def review(self, judged: Judged) -> npt.NDArray[np.bool_]:
        """(N,) whether a person should look at the row."""
        assert self.abstain is not None
        own = {self.labels.index(label): threshold for label, threshold in self.abstain.thresholds.items()}
        return needs_review(judged.probability, judged.label, own, self.abstain.others)

    def label_sets(self, probabilities: Floats) -> list[list[str]]:
        """The labels of each row's set, the likeliest first; it has at least one."""
        assert self.prediction_sets is not None
        order = np.argsort(-probabilities, axis=1, kind="stable")
        least = self.prediction_sets.least_probability
        sizes = np.maximum(1, (probabilities >= least).sum(axis=1)).tolist()
        return [[self.labels[label] for label in row[:size]] for row, size in zip(order.tolist(), sizes, strict=True)]

    @property
    def _scaling(self) -> Scaling:
        return Scaling(np.array(self.scale), np.array(self.offset))


class MeasuredConfidence(Result):
    """The calibration of a version, measured on rows whose labels arrived later."""

    calibration_error: float
    answered: float | None = None
    """The share of rows that are not for a person; None if the version marks none."""
    error: float | None = None
    """The share of errors among them."""
    max_error: float | None = None
    """The bound of the version."""


class AnsweredGroup(Result):
    """The test rows with one predicted label, or with any of the other labels."""

    label: str | None
    threshold: float | None
    """None: no row is answered."""
    rows: int
    answered: int
    errors: int
    """Of the answered rows."""
    at_most: float | None
    """Upper bound of the share of errors among answered rows."""


class AnsweredShare(Result):
    """The test rows that the model answers."""

    share: float
    error: float | None
    """The share of errors among them."""
    max_error: float
    confidence: float
    groups: list[AnsweredGroup]


class CalibrateResult(Result):
    """The calibration of a model, and its measures on the rows of test."""

    validation_rows: int
    test_rows: int | None
    """None if test is not evaluated: then nothing is measured."""
    calibration_error_before: float | None
    calibration_error: float | None
    answered: AnsweredShare | None
    mean_set_size: float | None
    """Labels in a prediction set."""


def most_characters(labels: Sequence[str], *, has_many: bool) -> int:
    """The most characters of a calibration of these labels, without thresholds: with `has_many`, each label may have a
    scale and an offset of its own."""
    widest = [-1.23456789e-05] * (len(labels) if has_many else 1)
    function: Literal["sigmoid", "softmax"] = "sigmoid" if has_many else "softmax"
    return len(Calibration(function=function, labels=list(labels), scale=widest, offset=widest).text())


def read_logits(predictions: pa.Table, labels: int) -> Floats:
    """(N, L) the column `logits` of predictions."""
    return np.asarray(as_matrix(predictions["logits"], labels), np.float64)


def describe_review(record: Mapping[str, Any]) -> list[str]:
    """Lines of a record in a terminal, besides those of the task type."""
    lines = ["    for a person: the probability is below the threshold"] if record.get(REVIEW) else []
    return [*lines, *([f"    one of: {', '.join(record[LABEL_SET])}"] if LABEL_SET in record else [])]
