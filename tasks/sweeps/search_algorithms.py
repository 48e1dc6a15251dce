"""Samplers, which propose the settings of trials, and pruners, which decide which trials pause at an evaluation and
which paused ones are resumed.

Samplers are Optuna's. The pruner `asha` is asynchronous successive halving (Li et al., arXiv:1810.05934, algorithm 2):
a trial pauses at the evaluations 1, 3, 9, … (`min_resource * reduction_factor ** rung`), and continues as soon as it is
among the best 1 of `reduction_factor` of all trials that reached this rung. `hyperband` divides the trials among
brackets of `asha` whose first rungs differ (Li et al., arXiv:1603.06560). `median` and `percentile` are Optuna's; they
resume no trial.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tasks.sweeps.trial_state import Trial
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

    if sweep.variants:
        return optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING, params={}, distributions={})
    study = optuna.create_study(direction=sweep.direction, sampler=_build_sampler(sweep, number))
    study.add_trials(earlier)
    trial = study.ask()
    chosen: dict[str, Any] = {}
    for name, parameter in sweep.space.items():
        if _holds(parameter.when, chosen):
            chosen[name] = _decode(parameter, _suggest(trial, name, parameter))
    return study.get_trials(deepcopy=False)[-1]


def settings_from(sweep: Sweep, params: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Values by recipe field from a trial's stored parameters, or from its number if the sweep has variants."""
    if sweep.variants:
        return sweep.settings_of_trial(number)
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


Better = Callable[[float], float]
"""Maps a value of the metric to one of which less is better."""


class Pruner(Protocol):
    """Decides by the evaluations of all trials."""

    def pauses(self, trial: Trial, evaluation: int, trials: Sequence[Trial]) -> bool:
        """Whether the trial pauses after this evaluation, which is its last one so far; `trials` include it."""

    def find_resumable(self, trials: Sequence[Trial], at_end: bool) -> Trial | None:
        """A paused trial that continues now. `at_end`: no other trial runs or will be proposed."""


class NoPruner:
    """Pauses no trial."""

    def pauses(self, trial: Trial, evaluation: int, trials: Sequence[Trial]) -> bool:
        """False."""
        return False

    def find_resumable(self, trials: Sequence[Trial], at_end: bool) -> Trial | None:
        """None."""
        return None


class OptunaPruner(NoPruner):
    """A pruner of Optuna that reads nothing but evaluations.

    Args:
        prune: whether it would prune the trial with this number.
    """

    def __init__(self, prune: Callable[[int], bool]) -> None:
        self._prune = prune

    def pauses(self, trial: Trial, evaluation: int, trials: Sequence[Trial]) -> bool:
        """Whether Optuna's pruner would end the trial."""
        return self._prune(trial.number)


class SuccessiveHalving:
    """Asynchronous successive halving, in one bracket or several.

    Args:
        rank: maps a value to one of which less is better.
        min_resource: evaluations at the first rung.
        reduction_factor: one of so many trials continues at each rung.
        brackets: bracket b begins at rung b, and each trial is in one, by its number.
    """

    def __init__(self, rank: Better, min_resource: int, reduction_factor: int, brackets: int = 1) -> None:
        self._rank, self._factor, self._brackets = rank, reduction_factor, brackets
        self._first = max(1, min_resource)

    def pauses(self, trial: Trial, evaluation: int, trials: Sequence[Trial]) -> bool:
        """Whether the evaluation is a rung at which the trial is not among the best."""
        return self._is_rung(trial, evaluation) and trial.number not in self._best(trial, evaluation, trials)

    def find_resumable(self, trials: Sequence[Trial], at_end: bool) -> Trial | None:
        """The best paused trial of the highest rung at which one may continue. At the end, if none has completed, the
        best of the highest rung."""
        paused = sorted((trial for trial in trials if trial.state == "paused"), key=self._order)
        for trial in paused:
            if trial.number in self._best(trial, _paused_at(trial), trials):
                return trial
        if at_end and paused and not any(trial.state == "completed" for trial in trials):
            return paused[0]
        return None

    def _order(self, trial: Trial) -> tuple[int, float, int]:
        rung = _paused_at(trial)
        return -rung, self._rank(trial.evaluations[rung]), trial.number

    def _is_rung(self, trial: Trial, evaluation: int) -> bool:
        rung = self._first * self._factor ** self._bracket(trial)
        while rung < evaluation:
            rung *= self._factor
        return rung == evaluation

    def _bracket(self, trial: Trial) -> int:
        return (trial.number - 1) % self._brackets

    def _best(self, trial: Trial, rung: int, trials: Sequence[Trial]) -> set[int]:
        """The numbers of the trials that may continue at this rung of the trial's bracket."""
        there = [
            (self._rank(other.evaluations[rung]), other.number)
            for other in trials
            if rung in other.evaluations and self._bracket(other) == self._bracket(trial)
        ]
        return {number for _, number in sorted(there)[: len(there) // self._factor]}


def _paused_at(trial: Trial) -> int:
    """The last evaluation of a paused trial."""
    return max(trial.evaluations)


def build_optuna_pruner(name: str, settings: Mapping[str, Any]) -> Any:
    """Optuna's pruner of this name."""
    from optuna import pruners

    classes = {"median": pruners.MedianPruner, "percentile": pruners.PercentilePruner}
    return classes[name](**settings)
