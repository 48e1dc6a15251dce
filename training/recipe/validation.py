"""From values to a recipe: overrides, referenced files, fields and rules, with all problems in one report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from training.problems import Problem, UserError
from training.recipe.error_messages import describe, field_name, find_templates
from training.recipe.fields import Recipe
from training.recipe.overrides import ENTRYPOINT, merge, read_entry
from training.recipe.referenced_files import ExpandedRecipe
from training.recipe.rules.compute_rules import COMPUTE_RULES
from training.recipe.rules.data_rules import DATA_RULES
from training.recipe.rules.model_rules import MODEL_RULES, TASK_RULES
from training.recipe.rules.release_rules import RELEASE_RULES, with_usual_metric
from training.recipe.rules.rule import WrittenRecipe, broken_rules
from training.recipe.rules.training_rules import TRAINING_RULES

# Later rules rely on the fields that earlier ones found right.
RULES = (*TASK_RULES, *DATA_RULES, *MODEL_RULES, *TRAINING_RULES, *COMPUTE_RULES, *RELEASE_RULES)


def parse(values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe that `values` spells, after `overrides` (`{"training.learning_rate": 3e-5}`).

    Raises UserError with every mistake found, one problem a field.
    """
    if not isinstance(values, Mapping):
        raise UserError([Problem(kind="recipe", where="recipe", message=f"{values!r} is not a mapping of fields.")])
    merged, problems = merge(values, overrides or {}, Recipe)
    expanded = ExpandedRecipe(with_usual_metric(merged))
    problems += [*expanded.problems, *find_templates(merged)]
    merged, before = expanded.values, len(problems)
    recipe, wrong = None, {problem.where for problem in problems}
    # The values in a broken file are unknown, so nothing is checked that may depend on them.
    wrong |= {"compute"} if any(not problem.where.startswith("data.") for problem in expanded.problems) else set()
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += [describe(detail, Recipe) for detail in details]
        wrong |= {field_name(detail["loc"]) for detail in details}
    problems += broken_rules(RULES, WrittenRecipe(Recipe, merged, wrong))
    problems[before:] = map(expanded.locate, problems[before:])
    # A template in a name also breaks the name's pattern: the first problem of a field explains the others.
    first = {problem.where: problem for problem in reversed(problems)}
    if recipe is None or first:
        raise UserError(reversed(first.values()))
    return recipe


def load(file: Path, overrides: Mapping[str, Any] | None = None, entry: str | None = None) -> Recipe:
    """The recipe of a Prefect deployment file: `parameters.recipe` of its entry for the finetune flow.

    `entry` names one if the file has several. The entry's own `parameters.overrides` come before `overrides`.
    Raises UserError for the file, with its line, or with every mistake of the recipe.
    """
    parameters = read_entry(file, ENTRYPOINT, entry)
    return parse(parameters["recipe"], {**parameters.get("overrides", {}), **(overrides or {})})
