"""What a recipe would run here, looked at before anything does, with all of its mistakes."""

from __future__ import annotations

from flows.pipeline import Finished, pipeline
from tasks.cache.planner import Planner
from tasks.cache.refs import Lock
from tasks.stages.preflight.model_check import require_model
from training.problems import NETWORK, Problem, UserError
from training.recipe import Recipe


def planned(recipe: Recipe, planner: Planner, *, runs: bool) -> tuple[Finished, str | None]:
    """The walk over the stages, and why the model was not checked (None: it was, or no training would run).

    With `runs`, config.json may be downloaded, and a model from scratch without adapters is left to load_model, which
    builds it at once. Raises UserError with the problems of the walk and of the model together.
    """
    problems: list[Problem] = []
    finished, unchecked = None, None
    try:
        finished = pipeline(planner, recipe)
    except UserError as error:
        problems += error.problems
    trains = finished is None or any(row.name == "fit" and row.state != "cached" for row in planner.rows)
    built_soon = runs and recipe.model.source == "scratch" and recipe.training.lora is None
    if trains and not built_soon:
        try:
            unchecked = require_model(recipe, finished.lock if finished else Lock(), download=runs)
        except UserError as error:
            away = all(problem.kind == NETWORK for problem in error.problems)
            unchecked = f"the model was not checked. {error}" if away else None
            problems += [] if away else error.problems
    if problems or finished is None:
        raise UserError(problems)
    return finished, unchecked
