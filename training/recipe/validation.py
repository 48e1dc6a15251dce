"""From values to a recipe: overrides, referenced files, fields and rules, with all problems in one report."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from training.problems import Problem, UserError, nearest
from training.recipe.data_fields import MIX, Data, entries_of, locate_all, section_of_set, set_names
from training.recipe.error_messages import describe, find_templates
from training.recipe.field_types import field_name
from training.recipe.fields import Recipe
from training.recipe.overrides import ENTRYPOINT, merge, read_entry
from training.recipe.reading_rules import FIELDS as READING_FIELDS
from training.recipe.reading_rules import ReadingRules
from training.recipe.referenced_files import ExpandedRecipe
from training.recipe.rules.compute_rules import COMPUTE_RULES
from training.recipe.rules.data_rules import DATA_RULES, MIX_RULES, READING_RULES, unfitting_columns
from training.recipe.rules.image_rules import IMAGE_RULES
from training.recipe.rules.model_rules import MODEL_RULES, TASK_RULES
from training.recipe.rules.release_rules import RELEASE_RULES, with_usual_metric
from training.recipe.rules.rule import InvalidFieldError, WrittenRecipe, broken_rules
from training.recipe.rules.slice_rules import with_usual_slice
from training.recipe.rules.training_rules import TRAINING_RULES
from training.recipe.source_columns import ROLE_FIELDS, TEXTS, columns_by_role
from training.recipe.tables.formats import FORMATS

_IS_SHARE = re.compile(r"data\.mix\[\d+\](\.weight|\.epochs)?")
OTHER_RULES = (*MODEL_RULES, *TRAINING_RULES, *COMPUTE_RULES, *RELEASE_RULES, *IMAGE_RULES)


def parse(values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe that `values` spells, after `overrides` (`{"training.learning_rate": 3e-5}`).

    Raises UserError with every mistake found, one problem a field.
    """
    if not isinstance(values, Mapping):
        raise UserError.of("recipe", "recipe", f"{values!r} is not a mapping of fields.")
    merged, problems = merge(values, overrides or {}, Recipe)
    expanded = ExpandedRecipe(with_usual_slice(with_usual_metric(merged)))
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
    problems += _broken_rules(merged, wrong)
    problems[before:] = map(expanded.locate, problems[before:])
    # A template in a name also breaks the name's pattern: the first problem of a field explains the others.
    first = {problem.where: problem for problem in reversed(problems)}
    if recipe is None or first:
        raise UserError(reversed(first.values()))
    return recipe


def _broken_rules(values: Mapping[str, Any], wrong: set[str]) -> list[Problem]:
    """The problems of all rules. Later rules rely on the fields that earlier ones found right.

    The rules about rows hold for each set of a mixture; all others read the first set.
    """
    written = WrittenRecipe(Recipe, values, wrong)
    problems = broken_rules(TASK_RULES, written)
    # A wrong column of one set says nothing about the weights of all.
    readable = {field for field in wrong if not field.startswith(f"data.{MIX}[") or _IS_SHARE.fullmatch(field)}
    problems += broken_rules(MIX_RULES, WrittenRecipe(Recipe, values, readable))
    data = values.get("data")
    entries = entries_of(data)
    if not entries or not isinstance(data, Mapping):
        return problems + broken_rules((*DATA_RULES, *OTHER_RULES), written)
    sets = []
    for index, entry in enumerate(entries):
        section = {**section_of_set(data, entry), MIX: data[MIX]}
        invalid = {_without_index(field, index, entry) for field in written.invalid} - {""}
        view = WrittenRecipe(Recipe, {**values, "data": section}, invalid)
        problems += locate_all(broken_rules(DATA_RULES, view), index, entry, data)
        sets.append(view)
    with contextlib.suppress(InvalidFieldError):
        found = unfitting_columns(sets, set_names(entries))
        problems += [Problem(kind="recipe", where=where, message=message) for where, message in found]
    return problems + list(locate_all(broken_rules(OTHER_RULES, sets[0]), 0, entries[0], data))


def _without_index(field: str, index: int, entry: Mapping[str, Any]) -> str:
    """The invalid field as one set has it: `data.text` for `data.mix[1].text`; empty if the set does not have it."""
    place = f"data.{MIX}[{index}]"
    if field.startswith(f"data.{MIX}["):
        return f"data{field.removeprefix(place)}" if field.startswith((f"{place}.", f"{place}[")) else ""
    name = field.removeprefix("data.").partition(".")[0].partition("[")[0]
    return "" if field.startswith("data.") and entry.get(name) is not None else field


def override_reading(
    rules: ReadingRules, values: Mapping[str, Any], task: Mapping[str, Any], columns: Mapping[str, str]
) -> ReadingRules:
    """The rules with other values of fields. Raises UserError with every mistake, as for a recipe.

    Args:
        rules: Of a registered version.
        values: By the names of the fields of `data`, such as `delimiter`, or `rename.body` for one of a mapping.
        task: The task type and its options.
        columns: The recipe's names of the columns that the model reads, by their roles.
    """
    fields = {name: name.partition(".")[0] for name in map(str, values)}
    problems = [
        Problem(
            kind="option",
            where=f"data.{name}",
            message=f"does not shape rows: choose from {', '.join(READING_FIELDS)}.{nearest(field, READING_FIELDS)}",
        )
        for name, field in fields.items()
        if field not in READING_FIELDS
    ]
    problems += find_templates(values, "data")
    known = {f"data.{name}": values[name] for name, field in fields.items() if field in READING_FIELDS}
    merged, not_merged = merge({"data": rules.mappings()}, known, Recipe)
    problems += not_merged
    given = {field: merged["data"][field] for field in fields.values() if field in merged["data"]}
    section = {
        "source": "csv",  # which takes all fields
        "path": "rows",
        "text": [columns[role] for role in TEXTS if role in columns] or None,
        "columns": {role: name for role, name in columns.items() if role not in ROLE_FIELDS},
        **{name: value for name, value in rules.sets[0].items() if name == "label"},
        **given,
    }
    if str(given.get("source", "csv")) not in FORMATS:
        message = f"{given['source']!r} is no format of files: choose from {', '.join(FORMATS)}."
        problems.append(Problem(kind="option", where="data.source", message=message))
        section["source"] = "csv"
    checked, wrong = dict[str, Any](), {problem.where for problem in problems}
    try:
        checked = Data.model_validate(section).model_dump(mode="json", include={*given})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            detail["loc"] = ("data", *detail["loc"])
            problems.append(describe(detail, Recipe))
            wrong.add(field_name(detail["loc"]))
    problems += broken_rules(READING_RULES, WrittenRecipe(Recipe, {**task, "data": section}, wrong))
    for role in columns_by_role(checked.get("text"), None, checked.get("columns") or {}):
        if role not in columns:
            where = "data.text" if role in TEXTS else f"data.columns.{role}"
            message = f"the model does not read {role!r}: it reads {', '.join(columns)}."
            problems.append(Problem(kind="option", where=where, message=message))
    if problems:
        raise UserError(problem.model_copy(update={"kind": "option"}) for problem in problems)
    return rules.model_copy(update={"overrides": {**rules.overrides, **checked}})


def load(file: Path, overrides: Mapping[str, Any] | None = None, entry: str | None = None) -> Recipe:
    """The recipe of a Prefect deployment file: `parameters.recipe` of its entry for the finetune flow.

    `entry` names one if the file has several. The entry's own `parameters.overrides` come before `overrides`.
    Raises UserError for the file, with its line, or with every mistake of the recipe.
    """
    parameters = read_entry(file, ENTRYPOINT, entry)
    return parse(parameters["recipe"], {**parameters.get("overrides", {}), **(overrides or {})})
