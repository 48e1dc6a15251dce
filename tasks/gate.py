"""Stage: whether the model has earned its promotion."""

from __future__ import annotations

from tasks.runtime.refs import Check, Ref, Verdict
from tasks.runtime.stage import Ingredients, Work, action
from training.problems import Problem, UserError, nearest
from training.recipe import Recipe


def ingredients(recipe: Recipe, scores: Ref) -> Ingredients:
    """The figures and their minima."""
    return Ingredients({"scores": scores.digest, "release": {"minimum": recipe.release.minimum}})


@action(ingredients, foreseeable=True)
def gate(work: Work, recipe: Recipe, scores: Ref) -> Verdict:
    """Promotes when every minimum of the recipe holds."""
    checks = []
    problems = []
    for figure, minimum in recipe.release.minimum.items():
        split, _, metric = figure.partition(".")
        scored = scores.figures.get(split, {})
        if metric in scored:
            checks.append(Check(figure=figure, value=scored[metric]["value"], minimum=minimum))
        else:  # only a metric of the user's own can get this far: its names are known when it has run
            has = ", ".join(f"{s}.{m}" for s, metrics in scores.figures.items() for m in metrics)
            message = f"there is no such figure: choose from {has}.{nearest(metric, scored)}"
            problems.append(Problem(kind="release", where=f"release.minimum.{figure}", message=message))
    if problems:
        raise UserError(problems)
    return Verdict(promote=all(check.held for check in checks), checks=checks)
