"""Predictions of rated completions: the rewards that a model gives to desirable and to undesirable ones.

N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from training.evaluation.constant_predictions import Baseline, Constant, column
from training.evaluation.generated_answers import AnsweredRows
from training.evaluation.predictions import Rows
from training.evaluation.preferences import NO_REWARD
from training.recipe.tables.metrics import RATED

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RatedCompletions(AnsweredRows):
    """The reward of each completion, 0 without tokens of it."""

    rewards: Floats  # (N,)
    desirable: npt.NDArray[np.bool_]  # (N,)
    completion_tokens: Rows  # (N,)
    mismatched_ratios: Floats  # (N,) log-probability of the mismatched completion less that under the reference

    prediction_type: ClassVar = RATED
    row_score_name: ClassVar[str] = "signed_reward"
    correct_metric: ClassVar[str | None] = "accuracy"

    @property
    def config_name(self) -> str:
        return "rated"

    @property
    def description(self) -> str:
        return "a rating of completions"

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def row_scores(self) -> Floats:
        """The reward of a desirable completion, and the negated one of an undesirable completion."""
        return np.asarray(np.where(self.desirable, self.rewards, -self.rewards))

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.row_scores > 0)

    def describe_row(self, row: int, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        names = ("undesirable", "desirable")
        return {
            "label": names[int(self.desirable[row])],
            "prediction": names[int(self.rewards[row] > 0)],
            "reward": round(float(self.rewards[row]), 4),
        }


def baseline_by_rating(train: Path) -> Baseline:
    """Every completion is desirable, or none is, chosen on the token rows of the training split."""
    desirable = column(train, "label").to_numpy() == 1
    nothing = np.zeros(len(desirable))
    rows = RatedCompletions(nothing, desirable, nothing.astype(np.int64), nothing)
    signs = {"desirable": 1, "undesirable": -1}
    return Baseline([Constant(f"'{name}'", partial(_rate, sign)) for name, sign in signs.items()], rows)


def _rate(sign: int, rows: RatedCompletions, split: str) -> RatedCompletions:
    return replace(rows, rewards=np.full(len(rows), sign * NO_REWARD))
