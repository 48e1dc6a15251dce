"""Pictures of a study, drawn by Optuna: history, importance of settings, slices, parallel coordinates."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.sweeps.study import Study

_logger = logging.getLogger(__name__)
MIN_COMPLETED = 2
"""Trials without which there is nothing to draw."""


def draw_pictures(study: Study, metric: str) -> Iterator[Path]:
    """Draws the pictures into the study's folder, and yields the file of each. One that cannot be drawn is left out."""
    if sum(trial.state == "completed" for trial in study.trials) < MIN_COMPLETED:
        return
    from optuna.visualization import matplotlib as pictures

    folder = study.folder / "pictures"
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
            _save(plot, study, folder / f"{name}.png", named)
        except Exception:  # such as importances of settings that no trial varies
            _logger.info("%s was not drawn", name, exc_info=True)
        else:
            yield folder / f"{name}.png"


def _save(plot: Callable[..., Any], study: Study, file: Path, named: dict[str, str]) -> None:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot

    matplotlib.use("Agg")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls these pictures experimental
        axes = plot(study.optuna, **named)
        figure = np.ravel(np.asarray(axes, dtype=object))[0].figure
        figure.set_size_inches(max(8.0, figure.get_size_inches()[0]), 6.0)
        figure.savefig(file, dpi=100, bbox_inches="tight")
        pyplot.close(figure)
