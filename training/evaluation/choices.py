"""Predictions of one choice of each row's own.

N rows, L choices of a row at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from training.evaluation.predictions import Floats, Predictions, Rows
from training.recipe.tables.metrics import CHOICES


@dataclass(frozen=True)
class Choices(Predictions):
    """One of the choices of each row, which are not those of another row: a choice is known by its place, from 0."""

    references: Rows  # (N,) the place of the right choice
    predictions: Rows  # (N,)
    probabilities: Floats  # (N, L) each row adds up to one; 0 where a row has fewer choices
    counts: Rows  # (N,) the number of choices

    prediction_type: ClassVar = CHOICES
    row_score_name: ClassVar[str] = "probability_of_label"
    correct_metric: ClassVar[str | None] = "accuracy"

    @property
    def description(self) -> str:
        return "a choice among those of each row"

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: Rows) -> Choices:
        return Choices(self.references[rows], self.predictions[rows], self.probabilities[rows], self.counts[rows])

    def concatenate(self, other: Choices) -> Choices:
        """With the probabilities of both as wide as those of the wider."""
        both, width = (self.probabilities, other.probabilities), max(self._width, other._width)
        wide = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in both]
        return Choices(
            np.concatenate([self.references, other.references]),
            np.concatenate([self.predictions, other.predictions]),
            np.concatenate(wide),
            np.concatenate([self.counts, other.counts]),
        )

    @property
    def _width(self) -> int:
        return self.probabilities.shape[1]

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """Places as integers; `prediction_scores` are the probabilities, (N, L)."""
        if feature == "prediction_scores":
            return self.probabilities if listed else None
        if feature not in ("predictions", "references") or listed or not dtype.startswith("int"):
            return None
        return self.predictions if feature == "predictions" else self.references

    @property
    def row_scores(self) -> Floats:
        """The probability of the right choice."""
        return self.probabilities[np.arange(len(self)), self.references]

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.predictions == self.references)

    @property
    def codes(self) -> tuple[Rows, Rows]:
        return self.references, self.predictions

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        prediction = self.predictions[row]
        return {
            "label": int(self.references[row]),
            "prediction": int(prediction),
            "probability": round(float(self.probabilities[row, prediction]), 4),
        }
