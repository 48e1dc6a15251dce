"""Stage: whether the model is registered, and whether it has earned its promotion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from tasks.runtime.refs import Check, Comparison, Ref, Verdict
from tasks.runtime.stage import Ingredients, Work, action
from training.problems import Problem, UserError, nearest
from training.recipe import Recipe

SLICES = "slices.json"


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
    warnings = list(_warnings(recipe))
    return Verdict(decision=decision, reason=reason, checks=checks, comparison=beside, warnings=warnings)


def _checks(recipe: Recipe, scores: Ref) -> list[Check]:
    """Every bound of the recipe, held against its figure. Raises UserError naming all that have no such figure."""
    gate, split = recipe.release.gate, recipe.judged_split
    figures: Mapping[str, Any] = scores.figures[split]
    checks, problems = [], []
    for bound, limits in (("minimum", gate.minimum), ("maximum", gate.maximum)):
        for metric, limit in limits.items():
            if metric in figures:
                value = math.nan if figures[metric]["value"] is None else figures[metric]["value"]
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
    gain = f"{beside.metric} {beside.value:.4g} beside {beside.champion_value:.4g} of {beside.champion}"
    if not beside.better:
        return "keep", f"{gain}: that may be chance (p = {beside.p_value:.2g})."
    return "promote", f"{gain}: at least {beside.at_least:+.4g} at {beside.confidence:.0%} confidence."


def _warnings(recipe: Recipe) -> Iterator[str]:
    training, split = recipe.training, recipe.judged_split
    chosen = training.load_best_model_at_end or training.early_stopping_patience is not None
    if split == "validation" and training.eval_strategy != "no" and chosen:
        yield (
            "validation also chose the checkpoint, so its figures flatter the model: set data.test_size, or add a "
            "test split, and evaluate it."
        )
