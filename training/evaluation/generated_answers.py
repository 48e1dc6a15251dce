"""Answers that a model generated for some of the rows, and those of its base model: their lengths.

N rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.evaluation.predictions import Predictions, Rows

Floats = npt.NDArray[np.float64]

ANSWER, TOKENS = "generated_answer", "generated_tokens"
"""The columns of predictions with an answer, and the number of its tokens; null for rows without one."""
BASE = "base_"
"""The prefix of the same columns for the base model."""


@dataclass(frozen=True)
class AnsweredRows(Predictions):
    """Predictions with the lengths of generated answers, in tokens: nan for rows without one."""

    generated_tokens: Floats = field(default_factory=lambda: np.empty(0), kw_only=True)  # (N,)
    base_generated_tokens: Floats = field(default_factory=lambda: np.empty(0), kw_only=True)  # (N,)

    def __post_init__(self) -> None:
        for name in (TOKENS, f"{BASE}{TOKENS}"):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.full(len(self), np.nan))

    def take(self, rows: Rows) -> Self:
        return replace(self, **{one.name: getattr(self, one.name)[rows] for one in fields(self)})

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """The fields by their names, such as `generated_tokens`."""
        known = {one.name: getattr(self, one.name) for one in fields(self)}
        return None if listed else known.get(feature)


def lengths_of(predictions: pa.Table) -> dict[str, Floats]:
    """The fields of AnsweredRows that stored predictions have."""
    names = [name for name in (TOKENS, f"{BASE}{TOKENS}") if name in predictions.column_names]
    return {name: predictions[name].cast("float64").to_numpy() for name in names}
