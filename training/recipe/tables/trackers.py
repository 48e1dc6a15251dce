"""The trackers besides MLflow that a run may report to.

A new tracker is a line here and the module that it names, with a subclass of tasks.tracking.tracker.Tracker.
"""

from __future__ import annotations

from typing import NamedTuple


class TrackerEntry(NamedTuple):
    """One tracker, as the rules of a recipe see it."""

    tracker: str
    """`module:class`, imported only if a recipe names the tracker."""
    package: str
    """The package that it needs beyond those of this project, by the name under which Python imports it."""


TRACKERS: dict[str, TrackerEntry] = {
    "tensorboard": TrackerEntry("tasks.tracking.tensorboard:TensorBoard", package="tensorboard"),
    "wandb": TrackerEntry("tasks.tracking.wandb:WeightsAndBiases", package="wandb"),
}
"""The values of training.report_to."""
