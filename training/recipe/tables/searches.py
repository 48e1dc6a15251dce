"""The samplers and pruners of a sweep, and their settings with defaults.

The samplers, `median` and `percentile` are Optuna's. `asha` and `hyperband` are the project's own
(tasks/sweeps/search_algorithms.py): Optuna ends a pruned trial for good, and here it may be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAMPLERS: dict[str, Mapping[str, Any]] = {
    "tpe": {"n_startup_trials": 10, "n_ei_candidates": 24, "multivariate": False, "group": False},
    "random": {},
    "grid": {},
    "cmaes": {"n_startup_trials": 1, "sigma0": None, "with_margin": False, "lr_adapt": False},
}
"""Settings of each sampler: those of Optuna's class of this name."""

PRUNERS: dict[str, Mapping[str, Any]] = {
    "none": {},
    "asha": {"min_resource": 1, "reduction_factor": 3},
    "hyperband": {"min_resource": 1, "reduction_factor": 3, "brackets": 3},
    "median": {"n_startup_trials": 5, "n_warmup_steps": 0, "n_min_trials": 1},
    "percentile": {"percentile": 25.0, "n_startup_trials": 5, "n_warmup_steps": 0, "n_min_trials": 1},
}
"""Settings of each pruner. Resources and steps are evaluations of the validation split during training."""
