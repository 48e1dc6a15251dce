"""A trial of a sweep: the settings that it tries, and how far it has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TrialState = Literal["running", "interrupted", "paused", "completed", "failed"]
UNFINISHED = ("running", "interrupted")
"""States of trials that the same sweep continues."""
COLUMNS = ("trial", "state", "time")
"""Columns of the table of trials besides the settings and the metric."""


@dataclass(frozen=True)
class Trial:
    """One set of settings."""

    number: int
    """From 1, in the order of proposal."""
    settings: Mapping[str, Any]
    """Values by dotted recipe field."""
    state: TrialState
    """paused: stopped by the pruner with a checkpoint. interrupted: its sweep was stopped or killed."""
    evaluations: Mapping[int, float] = field(default_factory=dict)
    """The metric after each evaluation during training, counted from 1."""
    value: float | None = None
    """The metric on the validation split at the end; None if the trial has not completed."""
    low: float | None = None
    """Lower end of the metric's 95 % interval."""
    high: float | None = None
    """Upper end of the metric's 95 % interval."""
    resumed_after: int = 0
    """The evaluation at which it was paused before it was resumed; 0 if it was not."""
    flow_run_id: str | None = None
    """Its first flow run, whose MLflow run it keeps."""
    seconds: float = 0.0
    """Time that it took, in all its parts."""
    reason: str | None = None
    """Why it failed."""

    @property
    def last_value(self) -> float | None:
        """The value at the end, or else of the last evaluation; None before the first."""
        if self.value is not None or not self.evaluations:
            return self.value
        return self.evaluations[max(self.evaluations)]


def short_names(fields: Iterable[str]) -> dict[str, str]:
    """The last part of each dotted field; the whole field if that is the last part of another one too, or a column of
    the table of trials."""
    whole = list(dict.fromkeys(fields))
    last = [field.rpartition(".")[2] for field in whole]
    return {
        field: name if last.count(name) == 1 and name not in COLUMNS else field
        for field, name in zip(whole, last, strict=True)
    }
