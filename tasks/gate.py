"""Stage: whether the model is registered, and whether it has earned its promotion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from tasks.runtime.refs import Check, Comparison, Ref, Verdict
from tasks.runtime.stage import Ingredients, Work, action
from training.problems import Problem, UserError, nearest
from training.recipe import Recipe


def ingredients(recipe: Recipe, scores: Ref, comparison: Ref | None) -> Ingredients:
    """The figures, what they must reach, and how the model stands beside the champion."""
    upstream = {"score": scores.digest, "compare": comparison.digest if comparison else None}
    return Ingredients({"upstream": upstream, "release": {"gate": recipe.release.gate.model_dump()}})


@action(ingredients, foreseeable=True)
def gate(work: Work, recipe: Recipe, scores: Ref, comparison: Ref | None) -> Verdict:
    """Rejects what misses a bound of the recipe's, keeps what is no better than the champion, promotes the rest."""
    checks = _checks(recipe, scores)
    beside = Comparison.model_validate(comparison.figures) if comparison else None
    decision, reason = _decided(checks, beside)
    warnings = [*_warnings(recipe), *(beside.warnings if beside else [])]
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
            else:  # only a metric of the user's own can get this far: its names are known when it has run
                message = f"there is no such figure: choose from {', '.join(figures)}.{nearest(metric, figures)}"
                problems.append(Problem(kind="release", where=f"release.gate.{bound}.{metric}", message=message))
    if problems:
        raise UserError(problems)
    return checks


def _decided(checks: Sequence[Check], beside: Comparison | None) -> tuple[Literal["promote", "keep", "reject"], str]:
    missed = [str(check) for check in checks if not check.held]
    if missed:
        return "reject", f"it misses {', '.join(missed)}."
    if beside is None:
        return "promote", "it reaches every minimum, and there is no other champion to compare it with."
    return "promote" if beside.better else "keep", f"{_told(beside)}."


def _told(beside: Comparison) -> str:
    """How the model stands beside the champion, and what that means."""
    return (
        f"{beside.metric} {beside.value:.4f} beside {beside.champion_value:.4f} of {beside.champion} on the same "
        f"{beside.rows:,} rows of {beside.split}: {beside.gained:,} rows better, {beside.lost:,} worse; "
        f"{_meaning(beside)}"
    )


def _meaning(beside: Comparison) -> str:
    margin, sure = beside.margin, f"at {100 * beside.confidence:g}% confidence"
    if not math.isfinite(beside.gain):
        return "one of these is no number, so nothing shows that it is better"
    if beside.better:
        least = f"{abs(beside.at_least):.4f}"
        return f"that is {f'better by at least {least}' if beside.at_least > 0 else f'worse by at most {least}'} {sure}"
    asked = f"{'worse' if margin < 0 else 'better'} by more than {abs(margin):g}" if margin else "better"
    if beside.gain > margin:
        chance = f"p = {beside.p_value:.2g}"
        return f"it may be {asked} ({chance})" if margin < 0 else f"that it is {asked} may be chance ({chance})"
    return f"that is {asked}" if margin < 0 else f"that is not {asked}"


def _warnings(recipe: Recipe) -> Iterator[str]:
    training, split = recipe.training, recipe.judged_split
    chosen = training.load_best_model_at_end or training.early_stopping_patience is not None
    if split == "validation" and training.eval_strategy != "no" and chosen:
        yield (
            "validation also chose the checkpoint, so its figures flatter the model: set data.test_size, or add a "
            "test split, and evaluate it."
        )
