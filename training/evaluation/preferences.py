"""Predictions of preferences: the rewards that a model gives to the two answers of each pair.

N pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from training.evaluation.predictions import Predictions, Rows
from training.recipe.tables.metrics import PAIRS

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Preferences(Predictions):
    """The rewards of a chosen and a rejected answer to each prompt. Without tokens of one of them, both are 0."""

    chosen_rewards: Floats  # (N,)
    rejected_rewards: Floats  # (N,)
    chosen_tokens: Rows  # (N,) tokens of the chosen answer
    rejected_tokens: Rows  # (N,)

    prediction_type: ClassVar = PAIRS
    row_score_name: ClassVar[str] = "margin"
    correct_metric: ClassVar[str | None] = "accuracy"

    @property
    def config_name(self) -> str:
        return "pairs"

    @property
    def description(self) -> str:
        return "a preference between two answers"

    def __len__(self) -> int:
        return len(self.chosen_rewards)

    def take(self, rows: Rows) -> Preferences:
        return Preferences(*(getattr(self, field.name)[rows] for field in fields(self)))

    def feature_values(self, metric: str, feature: str, dtype: str, listed: bool) -> npt.NDArray[Any] | None:
        """The fields by their names, such as `chosen_rewards`."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return None if listed else known.get(feature)

    @property
    def row_scores(self) -> Floats:
        """The reward of the chosen answer less that of the rejected one."""
        return np.asarray(self.chosen_rewards - self.rejected_rewards)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.chosen_rewards > self.rejected_rewards)

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        chosen, rejected = float(self.chosen_rewards[row]), float(self.rejected_rewards[row])
        return {
            "label": "chosen",
            "prediction": "chosen" if chosen > rejected else "rejected",
            "chosen_reward": round(chosen, 4),
            "rejected_reward": round(rejected, 4),
        }
