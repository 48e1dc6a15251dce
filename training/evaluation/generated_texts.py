"""Predictions of a text for each row.

N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from training.evaluation.predictions import Predictions, Rows
from training.recipe.tables.metrics import TEXTS


@dataclass(frozen=True)
class Generated(Predictions):
    """A text for each row.

    Rows are compared by chrF, not by equality: few texts equal their reference exactly.
    """

    references: npt.NDArray[np.object_]  # (N,) str
    predictions: npt.NDArray[np.object_]  # (N,) str

    prediction_type: ClassVar = TEXTS
    row_score_name: ClassVar[str] = "chrf"

    @property
    def description(self) -> str:
        return "a generation of texts"

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: Rows) -> Generated:
        return Generated(self.references[rows], self.predictions[rows])

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """The texts, as strings; references also as lists of one."""
        if dtype != "string" or feature not in ("predictions", "references") or (listed and feature == "predictions"):
            return None
        texts = self.predictions if feature == "predictions" else self.references
        return texts.reshape(-1, 1) if listed else texts

    @cached_property
    def row_scores(self) -> npt.NDArray[np.float64]:
        """The chrF of each row."""
        from training.evaluation.metrics.texts import Chrf

        if not len(self):
            return np.empty(0)
        chrf = Chrf(keep_in_memory=True)
        scores = chrf.of_sums(
            chrf.statistics(predictions=self.predictions.tolist(), references=self.references.tolist())
        )
        return np.nan_to_num(scores)  # a blank reference has none

    @property
    def codes(self) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.object_]]:
        return self.references, self.predictions

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "label": self.references[row],
            "prediction": self.predictions[row],
            "chrf": round(float(self.row_scores[row]), 2),
        }
