"""The recipe: what the user writes, and how a file or mapping becomes one.

fields.py  lora.py  section.py  forms.py  its sections, field by field; what they are made of; their schema for a form
overrides.py  files.py                    what is put into it: --set, files of label names, accelerate and DeepSpeed
rules.py, and one file a room of rules    what contradicts what
wording.py                                mistakes as sentences
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from training.problems import Problem, UserError
from training.recipe.error_messages import describe, field_name, templated
from training.recipe.fields import Compute, Data, Evaluation, Gate, Hub, Model, Recipe, Release, Tokens, Training
from training.recipe.overrides import finetune_entry, merge, parse_set, read_entries
from training.recipe.referenced_files import Expanded
from training.recipe.rules.release_rules import fits_slice, with_usual_metric
from training.recipe.rules.slice_rules import FEWEST_ROWS
from training.recipe.rules.training_rules import Written, broken_rules
from training.recipe.tables.checks import Level
from training.recipe.tables.metrics import more_is_better

__all__ = [
    "FEWEST_ROWS",
    "Compute",
    "Data",
    "Evaluation",
    "Gate",
    "Hub",
    "Level",
    "Model",
    "Recipe",
    "Release",
    "Tokens",
    "Training",
    "fits_slice",
    "load",
    "more_is_better",
    "parse",
    "parse_set",
    "read_entries",
]


def parse(values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe that `values` spells, after `overrides` (`{"training.learning_rate": 3e-5}`).

    Raises UserError with every mistake found, one problem a field.
    """
    if not isinstance(values, Mapping):
        raise UserError([Problem(kind="recipe", where="recipe", message=f"{values!r} is not a mapping of fields.")])
    merged, problems = merge(values, overrides or {}, Recipe)
    expanded = Expanded(with_usual_metric(merged))
    problems += [*expanded.problems, *templated(merged)]
    merged, as_written = expanded.values, len(problems)
    recipe, wrong = None, {problem.where for problem in problems}
    # What a file would have said is not known while something is wrong with it.
    wrong |= {"compute"} if any(not problem.where.startswith("data.") for problem in expanded.problems) else set()
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += [describe(detail, Recipe) for detail in details]
        wrong |= {field_name(detail["loc"]) for detail in details}
    problems += broken_rules(Written(Recipe, merged, wrong))
    # A template in a name also breaks the name's pattern: the first problem of a field is the telling one.
    problems[as_written:] = map(expanded.named, problems[as_written:])
    first = {problem.where: problem for problem in reversed(problems)}
    if recipe is None or first:
        raise UserError(reversed(first.values()))
    return recipe


def load(file: Path, overrides: Mapping[str, Any] | None = None, entry: str | None = None) -> Recipe:
    """The recipe of a Prefect deployment file: `parameters.recipe` of its entry for the finetune flow.

    `entry` names one where the file has several. The entry's own `parameters.overrides` come before
    `overrides`. Raises UserError: of the file with its line, or every mistake of the recipe.
    """
    parameters = finetune_entry(file, entry)
    return parse(parameters["recipe"], {**parameters.get("overrides", {}), **(overrides or {})})
