"""Stage: the verdict on the model: promote, keep or reject."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from tasks.cache.results import Artifact, Check, Selection, Verdict
from tasks.cache.stage import Inputs, Work, action
from tasks.reports.model_reports import read_slices
from training import task_types
from training.evaluation.scores import Comparison, HeldRows, NegativeFlips, SplitScores
from training.problems import Problem, UserError, nearest
from training.recipe import Recipe
from training.recipe.rules.slice_rules import FEWEST_ROWS, slice_of, unfitting_floor
from training.recipe.tables.metrics import METRICS, entries, more_is_better

ROUNDING = 1e-12  # 1 - 0.95 is a little more than 0.05, and 1 - 0.9 a little less than 0.1
MOST_LISTED = 10


def inputs(
    recipe: Recipe,
    scores: Artifact[SplitScores],
    comparison: Artifact[Comparison] | None,
    selection: Selection | None = None,
    held: Artifact[HeldRows] | None = None,
) -> Inputs:
    """The figures, their bounds, the comparison with the champion or the baseline, the sweep that chose the settings,
    and the rows that the model must have right."""
    upstream = {"score": scores.digest, "compare": comparison.digest if comparison else None}
    upstream |= {"must_hold": held.digest} if held else {}
    metrics, gate = entries([recipe.compared_by]), recipe.release.gate.model_dump()
    sweep = {"sweep": selection.model_dump(mode="json")} if selection else {}
    return Inputs({"upstream": upstream, "release": {"gate": gate}, "metrics": metrics, **sweep})


@action(inputs, read_only=True)
def gate(
    work: Work,
    recipe: Recipe,
    scores: Artifact[SplitScores],
    comparison: Artifact[Comparison] | None,
    selection: Selection | None = None,
    held: Artifact[HeldRows] | None = None,
) -> Verdict:
    """Rejects a model that misses a bound or a row that it must have right, keeps one that is no better than the
    champion or the baseline or flips too many rows, and promotes the others."""
    bounds, floors = _check_bounds(recipe, scores), _check_floors(recipe, scores)
    checks = [*bounds, *floors.checks, *_check_others(recipe, held.result if held else None)]
    compared = comparison.result if comparison else None
    missed = [*floors.unused, *_describe_wrong(held.result if held else None)]
    decision, reason = _decide(checks, missed, compared, recipe.release.gate.min_rows)
    warnings = [*_find_warnings(recipe, compared, selection), *floors.warnings]
    return Verdict(
        decision=decision,
        reason=reason,
        checks=checks,
        comparison=compared,
        must_hold=held.result if held else None,
        selection=selection,
        warnings=[*warnings, *(compared.warnings if compared else [])],
    )


def _check_bounds(recipe: Recipe, scores: Artifact[SplitScores]) -> list[Check]:
    """Raises UserError naming every bound of an unknown figure."""
    bounds, split = recipe.release.gate, recipe.judged_split
    found = scores.result[split]
    checks, problems = [], []
    for bound, limits in (("minimum", bounds.minimum), ("maximum", bounds.maximum)):
        for metric, limit in limits.items():
            if metric in found:
                value = found[metric]["value"]
                checks.append(Check.model_validate({"figure": f"{split}.{metric}", "value": value, bound: limit}))
            else:
                problems.append(_unknown_metric(f"release.gate.{bound}.{metric}", metric, found))
    if problems:
        raise UserError(problems)
    return checks


def _unknown_metric(where: str, metric: str, known: Iterable[str]) -> Problem:
    """Only the names of a user's metrics can be wrong here: they are known after the metrics have run."""
    message = f"there is no such metric: choose from {', '.join(known)}.{nearest(metric, known)}"
    return Problem(kind="release", where=where, message=message)


class _Floors(NamedTuple):
    checks: list[Check]
    unused: list[str]
    """Messages about floors for every group of a slice whose groups all have too few rows."""
    warnings: list[str]
    """Messages about groups with too few rows."""


def _check_floors(recipe: Recipe, scores: Artifact[SplitScores]) -> _Floors:
    """Raises UserError naming every unknown group and figure."""
    floors, split, slices = recipe.release.gate.floors, recipe.judged_split, recipe.evaluation.slices
    found = _Floors([], [], [])
    problems: list[Problem] = []
    by_slice = read_slices(scores.path)[split] if floors else {}
    for key, limits in floors.items():
        name, group = slice_of(key, slices) or ("", None)
        groups = {entry["group"]: entry for entry in by_slice.get(name, ())}
        where = f"release.gate.floors.{key}"
        if message := unfitting_floor(name, group, groups, split):
            problems.append(Problem(kind="release", where=where, message=message))
            continue
        judged = [groups[group]] if group is not None else []
        if group is None:
            judged = [entry for entry in groups.values() if entry["rows"] >= FEWEST_ROWS]
            if not judged:
                found.unused.append(
                    f"the floor for each {name} judges nothing: no group has {FEWEST_ROWS} rows or more in {split}, "
                    f"so set floors for single groups, such as {name}={next(iter(groups))}, or remove this floor"
                )
            small = [one for one, entry in groups.items() if entry["rows"] < FEWEST_ROWS]
            if small:
                more = f" and {len(small) - MOST_LISTED:,} more" if len(small) > MOST_LISTED else ""
                found.warnings.append(
                    f"the floor for each {name} does not judge groups of fewer than {FEWEST_ROWS} rows: "
                    f"{', '.join(small[:MOST_LISTED])}{more}."
                )
        for metric, limit in limits.items():
            if metric not in scores.result[split]:
                problems.append(_unknown_metric(f"{where}.{metric}", metric, scores.result[split]))
                continue
            for entry in judged:
                place = f"{name}={entry['group']}"
                # A floor for one group replaces the floor for every group. The key of another slice may look the same.
                own = floors.get(place, {}) if slice_of(place, slices) == (name, entry["group"]) else {}
                if group is not None or metric not in own:
                    found.checks.append(
                        Check.model_validate(
                            {
                                "figure": f"{split}.{place}.{metric}",
                                "value": entry["metrics"][metric]["value"],
                                "minimum": limit,
                                "group": place,
                                "rows": entry["rows"],
                            }
                        )
                    )
    if problems:
        raise UserError(problems)
    return found


def _check_others(recipe: Recipe, held: HeldRows | None) -> Iterator[Check]:
    """The share of the rows without a reason that are right."""
    must_hold = recipe.release.gate.must_hold
    if must_hold is not None and held is not None and held.others:
        share = 1 - held.others_wrong / held.others
        yield Check(figure="must_hold.share", value=share, minimum=must_hold.min_share)


def _describe_wrong(held: HeldRows | None) -> Iterator[str]:
    """The rows with a reason that are wrong."""
    if held is None or not held.named_wrong:
        return
    named = [row for row in held.wrong if row.reason][:MOST_LISTED]
    rows = [f"{row.text} is {row.prediction} and must be {row.label}: {row.reason.rstrip('.')}" for row in named]
    more = held.named_wrong - len(named)
    rows += [f"and {more:,} more"] if more else []
    yield f"of {held.named:,} rows that must hold, it has {held.named_wrong:,} wrong: {'; '.join(rows)}"


def _decide(
    checks: Sequence[Check], others: Sequence[str], comparison: Comparison | None, min_rows: int
) -> tuple[Literal["promote", "keep", "reject"], str]:
    """The decision and its reason; `others` are further reasons to reject."""
    missed = [check for check in checks if not check.passed]
    if missed or others:
        return "reject", f"{'; '.join([*_describe_missed(missed), *others])}."
    if comparison is None:
        return "promote", "it reaches every minimum, and there is no other champion to compare it with."
    described = _describe_comparison(comparison)
    units, unit = (comparison.rows, comparison.unit) if comparison.groups is None else (comparison.groups, "groups")
    if units < min_rows:
        more, few = min_rows - units, f"fewer {unit} than release.gate.min_rows, {min_rows:,}"
        return "keep", f"{described}, on {few}: add {more:,} more to {comparison.split}."
    if comparison.better and (flips := comparison.flips) and not flips.few_enough:
        return "keep", f"{described}. But {_describe_flips(flips, comparison)}."
    if comparison.better:
        return "promote", f"{described}."
    if comparison.baseline:
        opponent = "one answer for every row" if comparison.is_constant else comparison.champion
        rule = f"without a champion to be compared with, it must be better than {opponent}: "
        return "keep", f"{rule}{described}{_describe_unbeatable(comparison)}."
    return "keep", f"{described}."


def _describe_unbeatable(comparison: Comparison) -> str:
    """Advice if no model is better than a constant answer by this metric: the baseline has the best value, or the
    metric is the calibration error, which is near 0 for the labels' shares."""
    metric = comparison.metric
    best = METRICS[metric].most if metric in METRICS and more_is_better(metric) else None
    if metric == "calibration_error":
        reason = "Hardly any model is better than that"
    elif best is not None and comparison.champion_value >= best:
        reason = "No model can be better than that"
    else:
        return ""
    return f". {reason} by {metric}: set release.gate.compare to another metric, or release.gate.baseline to false"


def _describe_missed(missed: Sequence[Check]) -> Iterator[str]:
    """The missed bounds of all rows, then the missed floors of groups, largest gap first."""
    bounds = [check for check in missed if check.group is None]
    if poor := [str(check) for check in bounds if not math.isnan(check.value)]:
        yield f"it misses {', '.join(poor)}"
    for check in bounds:
        if math.isnan(check.value):
            yield f"{check.figure} has no value: docs/reference/metrics.md says when it has none"
    floors = sorted((check for check in missed if check.group is not None), key=_distance_to_floor)
    for check in floors[:MOST_LISTED]:
        split, _, rest = check.figure.partition(".")
        metric = rest.removeprefix(f"{check.group}.")
        rows = f"on {check.rows:,} rows of {split}"
        if math.isnan(check.value):
            yield f"{metric} has no value where {check.group}, {rows}: set a floor of another metric there"
        else:
            yield f"it is too poor where {check.group}: {metric} {check.inequality} {rows}"
    if len(floors) > MOST_LISTED:
        yield f"and {len(floors) - MOST_LISTED:,} more figures of groups miss their floor"


def _distance_to_floor(check: Check) -> float:
    """Value minus floor; minus infinity if there is no value."""
    return check.value - (check.minimum or 0.0) if math.isfinite(check.value) else -math.inf


def _describe_comparison(comparison: Comparison) -> str:
    return (
        f"{comparison.metric} {comparison.value:.4f} against {comparison.champion_value:.4f} of {comparison.champion} "
        f"on the same {_describe_rows(comparison)}: {comparison.gained:,} {comparison.unit} better, "
        f"{comparison.lost:,} worse; {_describe_significance(comparison)}"
    )


def _describe_rows(comparison: Comparison) -> str:
    in_groups = "" if comparison.groups is None else f" in {comparison.groups:,} groups"
    return f"{comparison.rows:,} {comparison.unit} of {comparison.split}{in_groups}"


def _describe_flips(flips: NegativeFlips, comparison: Comparison) -> str:
    """Why there are too many flips."""
    confidence = f"{100 * comparison.confidence:g}% confidence"
    limit = f"release.gate.flips.max_share, {flips.max_share:g}"
    found = (
        f"it has {flips.rows:,} rows wrong that {comparison.champion} has right, a share of {flips.share:.4f} that may "
        f"be {flips.at_most:.4f} at {confidence}, more than {limit}"
    )
    units, unit = (comparison.rows, "rows") if comparison.groups is None else (comparison.groups, "groups")
    if units < flips.needs:
        more = flips.needs - units
        return f"{found}, which takes {flips.needs:,} {unit} without any flip: add {more:,} more to {comparison.split}"
    return found


def _describe_significance(comparison: Comparison) -> str:
    margin, number, gain = comparison.margin, comparison.comparison, comparison.gain
    if not math.isfinite(gain):
        return "one of these is no number, so nothing shows that it is better"
    if not math.isfinite(comparison.at_least):
        return f"{comparison.metric} has no value on most draws of these rows, so nothing shows that it is better"
    confidence, ordinal = f"{100 * comparison.confidence:g}% confidence", f"comparison {number or 0:,} on these rows"
    if comparison.better:
        bound = f"{abs(comparison.at_least):.4f}"
        change = f"better by at least {bound}" if comparison.at_least > 0 else f"worse by at most {bound}"
        return f"that is {change} at {confidence}{f' ({ordinal})' if number else ''}"
    required = f"{'worse' if margin < 0 else 'better'} by more than {abs(margin):g}" if margin else "better"
    if gain <= margin:
        return f"that is {required}" if margin < 0 else f"that is not {required}"
    significance = 1 - comparison.confidence
    if comparison.least_p_value > significance + ROUNDING:
        test = ordinal if number else confidence
        return (
            f"{test} needs more permutations than are drawn: judge by rows of which none was judged before, or compare "
            "by accuracy if the task has it"
        )
    chance = f"p = {comparison.p_value:.2g}{f'; {ordinal} takes {significance:.2g}' if number else ''}"
    return f"it may be {required} ({chance})" if margin < 0 else f"that it is {required} may be chance ({chance})"


def _find_warnings(recipe: Recipe, comparison: Comparison | None, selection: Selection | None) -> Iterator[str]:
    training, split = recipe.training, recipe.judged_split
    if comparison is None and recipe.release.gate.baseline and not task_types.has_baseline(recipe.task):
        yield f"task type {recipe.task} has no baseline, so a model without a champion is compared with nothing."
    chooses = training.load_best_model_at_end or training.early_stopping_patience is not None
    if split == "validation" and training.eval_strategy != "no" and chooses:
        yield (
            "validation also chose the checkpoint, so its figures flatter the model: set data.test_size, or add a "
            "test split, and evaluate it."
        )
    if split == "validation" and selection is not None:
        yield (
            f"validation also chose these settings among {selection.trials} trials, so its figures flatter the model: "
            "set data.test_size, or add a test split, and evaluate it."
        )
    if selection is not None and selection.similar:
        numbers = ", ".join(map(str, selection.similar))
        yield f"the sweep cannot tell trial {selection.trial} apart from {numbers} on the rows of validation."
