"""Predictions of preferences: the rewards that a model gives to both answers of a pair, or to a labelled completion.
They may have the lengths of answers that it generated for some of the rows.

N pairs, or N completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.evaluation.constant_predictions import Baseline, Constant, read_column
from training.evaluation.predictions import Floats, Predictions, Rows
from training.recipe.tables.metrics import PAIRS, UNPAIRED

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


NO_REWARD = 1e-9
"""The reward of an answer that a constant preference chooses: only the order of rewards has a meaning."""
_BY_LENGTH = {"longer": 1, "shorter": -1}


@dataclass(frozen=True)
class Preferences(AnsweredRows):
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


def baseline_by_length(train: Path) -> Baseline:
    """The preference for the longer answer, or for the shorter one, chosen on the token rows of the training split."""
    lengths = [read_column(train, name).to_numpy() for name in ("chosen_tokens", "rejected_tokens")]
    constants = [Constant(f"'the {name} one'", partial(_prefer, sign)) for name, sign in _BY_LENGTH.items()]
    return Baseline(constants, Preferences(*np.zeros((2, len(lengths[0]))), *lengths))


def _prefer(sign: int, rows: Preferences, split: str) -> Preferences:
    chosen_first = sign * np.sign(rows.chosen_tokens - rows.rejected_tokens)
    rewards = (NO_REWARD * (chosen_first > 0), NO_REWARD * (chosen_first < 0))
    return Preferences(*rewards, rows.chosen_tokens, rows.rejected_tokens)


@dataclass(frozen=True)
class UnpairedPreferences(AnsweredRows):
    """The reward of each completion, 0 without tokens of it."""

    rewards: Floats  # (N,)
    desirable: npt.NDArray[np.bool_]  # (N,)
    completion_tokens: Rows  # (N,)
    mismatched_ratios: Floats  # (N,) log-probability of the mismatched completion less that under the reference

    prediction_type: ClassVar = UNPAIRED
    row_score_name: ClassVar[str] = "signed_reward"
    correct_metric: ClassVar[str | None] = "accuracy"

    @property
    def config_name(self) -> str:
        return "unpaired"

    @property
    def description(self) -> str:
        return "an unpaired preference"

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
    desirable = read_column(train, "label").to_numpy() == 1
    nothing = np.zeros(len(desirable))
    rows = UnpairedPreferences(nothing, desirable, nothing.astype(np.int64), nothing)
    signs = {"desirable": 1, "undesirable": -1}
    return Baseline([Constant(f"'{name}'", partial(_rate, sign)) for name, sign in signs.items()], rows)


def _rate(sign: int, rows: UnpairedPreferences, split: str) -> UnpairedPreferences:
    return replace(rows, rewards=np.full(len(rows), sign * NO_REWARD))
