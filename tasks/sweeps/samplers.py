"""Optuna's samplers, and the values that they propose for the fields of a recipe."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from training.recipe import Parameter, Sweep, grid_values, is_whole, settings_of
from training.recipe.tables.searches import SAMPLERS

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

Scalar = None | bool | int | float | str


def propose(sweep: Sweep, earlier: Sequence[FrozenTrial], number: int) -> FrozenTrial:
    """The next trial, proposed from the earlier ones.

    The sampler is made anew for each proposal and seeded by the sweep's seed and the trial's number, so a sweep that
    was killed proposes what it would have proposed.
    """
    import optuna

    study = optuna.create_study(direction=sweep.direction, sampler=_build_sampler(sweep, number))
    study.add_trials(earlier)
    trial = study.ask()
    chosen: dict[str, Any] = {}
    for name, parameter in sweep.space.items():
        if _holds(parameter.when, chosen):
            chosen[name] = _decode(parameter, _suggest(trial, name, parameter))
    return study.get_trials(deepcopy=False)[-1]


def settings_from(sweep: Sweep, params: Mapping[str, Any]) -> dict[str, Any]:
    """Values by recipe field from a trial's stored parameters."""
    return {name: _decode(parameter, params[name]) for name, parameter in sweep.space.items() if name in params}


def _suggest(trial: OptunaTrial, name: str, parameter: Parameter) -> Scalar:
    if parameter.choice is not None:
        return trial.suggest_categorical(name, [_encode(value) for value in parameter.choice])
    low, high = parameter.log or parameter.range or (0, 1)
    log = parameter.log is not None
    if is_whole(parameter):
        return trial.suggest_int(name, int(low), int(high), log=log, step=int(parameter.step or 1))
    return trial.suggest_float(name, low, high, log=log, step=parameter.step)


def _decode(parameter: Parameter, stored: Any) -> Any:
    """The recipe's value for a stored one: Optuna stores lists and mappings as JSON."""
    if parameter.choice is None:
        return stored
    return next(value for value in parameter.choice if _same(_encode(value), stored))


def _encode(value: Any) -> Scalar:
    return value if isinstance(value, Scalar) else json.dumps(value, sort_keys=True)


def _same(one: Scalar, other: Scalar) -> bool:
    return type(one) is type(other) and one == other


def _holds(conditions: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    """Whether the fields of a condition have one of its values."""
    return all(
        name in chosen and chosen[name] in (values if isinstance(values, list) else [values])
        for name, values in conditions.items()
    )


def _build_sampler(sweep: Sweep, number: int) -> BaseSampler:
    import numpy as np
    from optuna import samplers

    name, settings = settings_of(sweep.sampler, SAMPLERS)
    seed = int(np.random.SeedSequence([sweep.seed, number]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some settings are new in Optuna
        if name == "grid":
            grid = {name: [_encode(value) for value in grid_values(one) or ()] for name, one in sweep.space.items()}
            return samplers.GridSampler(grid, seed=sweep.seed)
        classes = {
            "tpe": samplers.TPESampler,
            "random": samplers.RandomSampler,
            "cmaes": samplers.CmaEsSampler,
        }
        return classes[name](**settings, seed=seed)
