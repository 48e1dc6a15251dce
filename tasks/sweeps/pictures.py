"""Pictures of a study, drawn by Optuna: history, importance of settings, slices, parallel coordinates."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.sweeps.study import Study
from tasks.sweeps.trial_state import short_names

if TYPE_CHECKING:
    import optuna

_logger = logging.getLogger(__name__)
WIDTH_OF_PLOT = 4.0
"""Inches of each of several plots in a row."""


def draw_pictures(study: Study, metric: str) -> Iterator[Path]:
    """Draws the pictures into the study's folder, and yields the file of each. One that cannot be drawn is left out."""
    if not any(trial.state == "completed" for trial in study.trials):
        return
    from optuna.visualization import matplotlib as pictures

    folder, shown = study.folder / "pictures", _shown_study(study)
    folder.mkdir(exist_ok=True)
    draw: dict[str, Callable[..., Any]] = {
        "history": pictures.plot_optimization_history,
        "importance": pictures.plot_param_importances,
        "slices": pictures.plot_slice,
        "parallel_coordinates": pictures.plot_parallel_coordinate,
        "evaluations": pictures.plot_intermediate_values,
    }
    for name, plot in draw.items():
        named = {} if name == "evaluations" else {"target_name": metric}
        try:
            _save(plot, shown, folder / f"{name}.png", named)
        except Exception:  # such as importances of settings that no trial varies
            _logger.info("%s was not drawn", name, exc_info=True)
        else:
            yield folder / f"{name}.png"


def _shown_study(study: Study) -> optuna.Study:
    """The trials with the numbers and the short names that people see elsewhere."""
    import optuna

    shown = optuna.create_study(direction=study.optuna.direction)
    shown.add_trial(optuna.create_trial(state=optuna.trial.TrialState.FAIL))  # Optuna counts from 0
    rows = study.last_rows()
    short = short_names(name for row in rows for name in row.params)
    for row in rows:
        shown.add_trial(
            optuna.create_trial(
                state=row.state,
                value=row.value,
                params={short[name]: value for name, value in row.params.items()},
                distributions={short[name]: values for name, values in row.distributions.items()},
                intermediate_values=row.intermediate_values,
            )
        )
    return shown


def _save(plot: Callable[..., Any], study: optuna.Study, file: Path, named: dict[str, str]) -> None:
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls these pictures experimental
        axes = np.ravel(np.asarray(plot(study, **named), dtype=object))
        figure = axes[0].figure
        figure.set_size_inches(max(8.0, WIDTH_OF_PLOT * len(axes)), 6.0)
        figure.savefig(file, dpi=100, bbox_inches="tight")
        pyplot.close(figure)
