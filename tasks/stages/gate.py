"""Stage: whether the model is registered, and whether it has earned its promotion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from tasks.cache.refs import Check, Comparison, Ref, Verdict
from tasks.cache.stage import Inputs, Work, action
from tasks.tracking.reports import read_slices
from training import task_types
from training.problems import Problem, UserError, nearest
from training.recipe import Recipe
from training.recipe.rules.slice_rules import FEWEST_ROWS, slice_of, unfitting_floor
from training.recipe.tables.metrics import METRICS, entries, more_is_better

ROUNDING = 1e-12  # 1 - 0.95 is a little more than 0.05, and 1 - 0.9 a little less than 0.1
MOST_TOLD = 10  # figures of groups that miss their floor, or groups that have too few rows for one


def inputs(recipe: Recipe, scores: Ref, comparison: Ref | None) -> Inputs:
    """The figures, what they must reach, and how the model stands beside the champion."""
    upstream = {"score": scores.digest, "compare": comparison.digest if comparison else None}
    metrics, gate = entries([recipe.compared_by]), recipe.release.gate.model_dump()
    return Inputs({"upstream": upstream, "release": {"gate": gate}, "metrics": metrics})


@action(inputs, read_only=True)
def gate(work: Work, recipe: Recipe, scores: Ref, comparison: Ref | None) -> Verdict:
    """Rejects what misses a bound of the recipe's, keeps what is no better than the champion or the baseline, promotes
    the rest."""
    checks = _checks(recipe, scores)
    floors, idle, unjudged = _floors(recipe, scores)
    checks += floors
    beside = Comparison.model_validate(comparison.figures) if comparison else None
    decision, reason = _decided(checks, idle, beside, recipe.release.gate.min_rows)
    warnings = [*_warnings(recipe, beside), *unjudged, *(beside.warnings if beside else [])]
    return Verdict(decision=decision, reason=reason, checks=checks, comparison=beside, warnings=warnings)


def _checks(recipe: Recipe, scores: Ref) -> list[Check]:
    """Every bound of the recipe, held against its figure. Raises UserError naming all that have no such figure."""
    gate, split = recipe.release.gate, recipe.judged_split
    figures: Mapping[str, Any] = scores.figures[split]
    checks, problems = [], []
    for bound, limits in (("minimum", gate.minimum), ("maximum", gate.maximum)):
        for metric, limit in limits.items():
            if metric in figures:
                value = figures[metric]["value"]
                checks.append(Check.model_validate({"figure": f"{split}.{metric}", "value": value, bound: limit}))
            else:
                problems.append(_no_such_figure(f"release.gate.{bound}.{metric}", metric, figures))
    if problems:
        raise UserError(problems)
    return checks


def _no_such_figure(where: str, metric: str, figures: Iterable[str]) -> Problem:
    """Only a metric of the user's own can get this far: its names are known when it has run."""
    message = f"there is no such figure: choose from {', '.join(figures)}.{nearest(metric, figures)}"
    return Problem(kind="release", where=where, message=message)


def _floors(recipe: Recipe, scores: Ref) -> tuple[list[Check], list[str], list[str]]:
    """Every floor, held against the groups that it is for; which floors judge nothing; and which groups none judges.
    Raises UserError naming all groups and figures that are not there."""
    floors, split = recipe.release.gate.floors, recipe.judged_split
    sliced = read_slices(scores.path)[split] if floors else {}
    checks: list[Check] = []
    idle: list[str] = []
    warnings: list[str] = []
    problems: list[Problem] = []
    for key, limits in floors.items():
        name, one = slice_of(key, recipe.evaluation.slices) or ("", None)  # a rule of recipes has seen to it
        groups = {group["group"]: group for group in sliced.get(name, ())}
        where = f"release.gate.floors.{key}"
        if message := unfitting_floor(name, one, groups, split):
            problems.append(Problem(kind="release", where=where, message=message))
            continue
        if one is None:
            judged = [group for group in groups.values() if group["rows"] >= FEWEST_ROWS]
            idle += [] if judged else [_idle(name, [*groups], split)]
            warnings += _unjudged(name, sliced[name])
        else:
            judged = [groups[one]]
        for metric, limit in limits.items():
            if metric not in scores.figures[split]:
                problems.append(_no_such_figure(f"{where}.{metric}", metric, scores.figures[split]))
                continue
            for group in judged:
                if one is not None or metric not in _own(recipe, name, group["group"]):
                    checks.append(_floor(split, f"{name}={group['group']}", metric, limit, group))
    if problems:
        raise UserError(problems)
    return checks, idle, warnings


def _own(recipe: Recipe, name: str, group: str) -> Mapping[str, float]:
    """The floors for that group alone, which come before those for each. What is called like it may be a slice."""
    key = f"{name}={group}"
    own = slice_of(key, recipe.evaluation.slices) == (name, group)
    return recipe.release.gate.floors.get(key, {}) if own else {}


def _idle(name: str, groups: Sequence[str], split: str) -> str:
    said = f"the floor for each {name} judges nothing: no group has {FEWEST_ROWS} rows or more in {split}"
    return f"{said}, so name those that matter, such as {name}={groups[0]}, or leave it out"


def _floor(split: str, of: str, metric: str, limit: float, group: Mapping[str, Any]) -> Check:
    found = {"value": group["metrics"][metric]["value"], "rows": group["rows"]}
    return Check.model_validate({"figure": f"{split}.{of}.{metric}", "minimum": limit, "group": of, **found})


def _unjudged(name: str, groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    small = [group["group"] for group in groups if group["rows"] < FEWEST_ROWS]
    if small:
        more = f" and {len(small) - MOST_TOLD:,} more" if len(small) > MOST_TOLD else ""
        listed = f"{', '.join(small[:MOST_TOLD])}{more}"
        yield f"the floor for each {name} does not judge groups of fewer than {FEWEST_ROWS} rows: {listed}."


def _decided(
    checks: Sequence[Check], idle: Sequence[str], beside: Comparison | None, min_rows: int
) -> tuple[Literal["promote", "keep", "reject"], str]:
    missed = [check for check in checks if not check.held]
    if missed or idle:
        return "reject", f"{'; '.join([*_missing(missed), *idle])}."
    if beside is None:
        return "promote", "it reaches every minimum, and there is no other champion to compare it with."
    if beside.rows < min_rows:
        more, rows = min_rows - beside.rows, f"fewer rows than release.gate.min_rows, {min_rows:,}"
        return "keep", f"{_told(beside)}, on {rows}: add {more:,} more to {beside.split}."
    if beside.baseline and not beside.better:
        rule = "without a champion to be compared with, it must be better than one answer for every row: "
        return "keep", f"{rule}{_told(beside)}{_unbeatable(beside)}."
    return "promote" if beside.better else "keep", f"{_told(beside)}."


def _unbeatable(beside: Comparison) -> str:
    """Advice if no model is better than a constant answer by this metric: its value is the best that there is, or it is
    the calibration error, which the labels' shares keep near 0."""
    metric = beside.metric
    if metric == "calibration_error":
        why = "Hardly any model is better than that"
    elif metric in METRICS and more_is_better(metric) and beside.champion_value >= (METRICS[metric].most or math.inf):
        why = "No model can be better than that"
    else:
        return ""
    return f". {why} by {metric}: set release.gate.compare to another metric, or release.gate.baseline to false"


def _missing(missed: Sequence[Check]) -> Iterator[str]:
    """What it misses over all rows; then, group by group, by how much it is too poor there, the worst first."""
    bounds = [check for check in missed if check.group is None]
    if poor := [str(check) for check in bounds if not math.isnan(check.value)]:
        yield f"it misses {', '.join(poor)}"
    for check in bounds:
        if math.isnan(check.value):
            yield f"{check.figure} has no value: docs/reference/metrics.md says when it has none"
    floors = sorted((check for check in missed if check.group is not None), key=_below)
    for check in floors[:MOST_TOLD]:
        split, _, rest = check.figure.partition(".")
        metric = rest.removeprefix(f"{check.group}.")
        on = f"on {check.rows:,} rows of {split}"
        if math.isnan(check.value):
            yield f"{metric} has no value where {check.group}, {on}: set a floor of another metric there"
        else:
            yield f"it is too poor where {check.group}: {metric} {check.told} {on}"
    if more := len(floors[MOST_TOLD:]):
        yield f"and {more:,} more figures of groups miss their floor"


def _below(check: Check) -> float:
    """How far a figure is above its floor; what is no number is farthest below it."""
    return check.value - (check.minimum or 0.0) if math.isfinite(check.value) else -math.inf


def _told(beside: Comparison) -> str:
    """How the model stands beside the champion, and what that means."""
    return (
        f"{beside.metric} {beside.value:.4f} beside {beside.champion_value:.4f} of {beside.champion} on the same "
        f"{beside.rows:,} rows of {beside.split}: {beside.gained:,} rows better, {beside.lost:,} worse; "
        f"{_meaning(beside)}"
    )


def _meaning(beside: Comparison) -> str:
    margin, sure, number = beside.margin, f"at {100 * beside.confidence:g}% confidence", beside.comparison
    if number:
        sure += f" (comparison {number:,} on these rows)"
    if not math.isfinite(beside.gain):
        return "one of these is no number, so nothing shows that it is better"
    if not math.isfinite(beside.at_least):
        return f"{beside.metric} has no value on most draws of these rows, so nothing shows that it is better"
    if beside.better:
        least = f"{abs(beside.at_least):.4f}"
        return f"that is {f'better by at least {least}' if beside.at_least > 0 else f'worse by at most {least}'} {sure}"
    asked = f"{'worse' if margin < 0 else 'better'} by more than {abs(margin):g}" if margin else "better"
    if beside.gain > margin and beside.least_p_value > 1 - beside.confidence + ROUNDING:
        which = f"comparison {number:,} on these rows" if number else f"{100 * beside.confidence:g}% confidence"
        return (
            f"{which} needs more permutations than are drawn: bring new rows, or compare by accuracy if the task has it"
        )
    if beside.gain > margin:
        chance = f"p = {beside.p_value:.2g}"
        if number:
            chance += f"; comparison {number:,} on these rows takes {1 - beside.confidence:.2g}"
        return f"it may be {asked} ({chance})" if margin < 0 else f"that it is {asked} may be chance ({chance})"
    return f"that is {asked}" if margin < 0 else f"that is not {asked}"


def _warnings(recipe: Recipe, beside: Comparison | None) -> Iterator[str]:
    training, split = recipe.training, recipe.judged_split
    if beside is None and recipe.release.gate.baseline and not task_types.has_baseline(recipe.task):
        yield f"task type {recipe.task} has no baseline, so a model without a champion is compared with nothing."
    chosen = training.load_best_model_at_end or training.early_stopping_patience is not None
    if split == "validation" and training.eval_strategy != "no" and chosen:
        yield (
            "validation also chose the checkpoint, so its figures flatter the model: set data.test_size, or add a "
            "test split, and evaluate it."
        )
