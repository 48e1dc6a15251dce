"""Messages for pydantic's errors in a recipe: the value, the allowed values, the next step."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from training.problems import Problem, nearest
from training.recipe.extra_arguments import arguments, out_of_scope, set_by_project
from training.recipe.field_types import INDEX, WORD, describe_field, field_name, section_fields, section_model, sections
from training.recipe.tables.optimizers import REFUSED

_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_NAMES = {
    "name": "lower-case letters, digits and '-', beginning with a letter or digit",
    "data.mix.name": "letters, digits, '.', '_' and '-', beginning with a letter or digit",
    **dict.fromkeys(
        ("compute.cluster_address", "cluster_address"), "host:port of the head of the cluster, such as 10.0.0.1:6379"
    ),
    "release.registry": "letters, digits, '.', '_' and '-', beginning with a letter or digit",
    **dict.fromkeys(
        ("release.champion", "release.challenger"), "letters, digits, '_' and '-', beginning with a letter"
    ),
    "release.hub.repo": "owner/name, of letters, digits, '.', '_' and '-'",
}

# Examples, which follow the length that a field takes.
_EXAMPLES = {"data.delimiter": ", such as ; or | (null: a comma, and in .tsv files a tab)"}
_SPREADSHEETS = ("excel", "spreadsheet", "xlsx", "xls", "ods")
# The alternative to a word, by field.
_ALTERNATIVES = {
    "training.class_weights": "weights by the labels' names",
    "training.lora.target_modules": "a list of names such as [q_proj, v_proj]",
}


def find_templates(values: Any, where: str = "") -> list[Problem]:
    """Returns a problem for each text with `{{`: `prefect deploy` would replace it, often by an empty text."""
    return [
        Problem(
            kind="recipe",
            where=place,
            message=f"{reprlib.repr(text)} holds '{{{{': Prefect templates parameters, so deployment would "
            "replace it; put the text into a file and name the file.",
        )
        for place, text in _texts(values, where)
        if "{{" in text
    ]


def _texts(values: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(values, str):
        yield where, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            place = f"{where}.{key}" if where else str(key)
            yield from ((place, key),) if isinstance(key, str) and "{{" in key else _texts(value, place)
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _texts(value, f"{where}[{index}]")


def describe(error: ErrorDetails, recipe: type[BaseModel]) -> Problem:
    """Converts one of pydantic's errors to a problem."""
    where = field_name(error["loc"])
    compose: Callable[[ErrorDetails, str, type[BaseModel]], str] = _MESSAGES.get(error["type"], _other)
    return Problem(kind="recipe", where=where, message=compose(error, where, recipe))


def _unknown_field(error: ErrorDetails, where: str, recipe: type[BaseModel]) -> str:
    section, _, name = where.rpartition(".")
    fields = section_fields(recipe, section) or recipe.model_fields
    if advice := out_of_scope(name):
        return advice
    if section == "training" and name in arguments():
        reason = set_by_project(name)
        return (
            f"cannot be set in a recipe: {reason}."
            if reason
            else f"belongs to `extra`: write it as training.extra.{name}."
        )
    if hint := nearest(name, fields):
        return f"no such field.{hint}"
    for other in sections(recipe):
        if name in (section_fields(recipe, other) or {}):
            return f"no such field. Did you mean '{other}.{name}'?"
    return f"no such field: choose from {', '.join(fields)}."


def _unknown_value(error: ErrorDetails, where: str, recipe: type[BaseModel]) -> str:
    value, name = error["input"], INDEX.sub("", where)
    if where == "training.optim" and (reason := REFUSED.get(str(value))):
        return f"{value!r} is refused: {reason}."
    if advice := out_of_scope(str(value)):
        return f"{value!r} {advice}"
    if name in ("data.source", "data.mix.source") and str(value).lower() in _SPREADSHEETS:
        return f"{value!r} is not read: save the spreadsheet as CSV, and set {where}: csv."
    allowed = [a or b for a, b in re.findall(r"'([^']*)'|(-?\d+)", error["ctx"]["expected"])]
    allowed += [_ALTERNATIVES.get(where, "a whole number")] if error["loc"][-1] == WORD else []
    return f"{_format_value(value)} is unknown: choose from {', '.join(allowed)}.{nearest(str(value), allowed)}"


def _missing(error: ErrorDetails, where: str, recipe: type[BaseModel]) -> str:
    section, _, name = where.rpartition(".")
    return f"is missing: {describe_field(section_model(recipe, section) or recipe, name)}"


def _wrong_type(error: ErrorDetails, where: str, recipe: type[BaseModel]) -> str:
    value, wanted = error["input"], _TYPES[error["type"]]
    hint = ""
    if wanted == "a list" and isinstance(value, str):
        hint = f" Write [{value}]."
    elif wanted == "text" and value is not None and not isinstance(value, list | dict):
        hint = " Put it in quotes."
    elif wanted == "a whole number" and isinstance(value, float) and value.is_integer():
        hint = f" Write {int(value)}."
    return f"{_format_value(value)} is of the wrong type: it takes {wanted}.{hint}"


def _out_of_range(error: ErrorDetails, where: str, recipe: type[BaseModel]) -> str:
    bound, words = _BOUNDS[error["type"]]
    return f"{_format_value(error['input'])} is out of range: it must be {words} {error['ctx'][bound]:,.15g}."


def _wrong_length(error: ErrorDetails, where: str, recipe: type[BaseModel]) -> str:
    context = error["ctx"]
    if error["type"] == "string_too_short":
        return "is empty: it takes text."
    if error["type"] == "string_too_long":
        most = f"at most {context['max_length']}{_EXAMPLES.get(where, '')}"
        return f"{_format_value(error['input'])} has {len(error['input'])} characters: it takes {most}."
    bound = "at least" if error["type"] == "too_short" else "at most"
    count = context.get("min_length", context.get("max_length"))
    return f"{_format_value(error['input'])} has {context['actual_length']} entries: it takes {bound} {count}."


def _wrong_name(error: ErrorDetails, where: str, recipe: type[BaseModel]) -> str:
    allowed = _NAMES[INDEX.sub("", where)]
    return f"{_format_value(error['input'])} is not a name for it: use {allowed}."


def _other(error: ErrorDetails, where: str, recipe: type[BaseModel]) -> str:
    return f"{_format_value(error['input'])}: {error['msg']}."


def _format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]  # as YAML spells them
    return reprlib.repr(value)


_MESSAGES = {
    "extra_forbidden": _unknown_field,
    "literal_error": _unknown_value,
    "missing": _missing,
    "too_short": _wrong_length,
    "too_long": _wrong_length,
    "string_too_short": _wrong_length,
    "string_too_long": _wrong_length,
    "string_pattern_mismatch": _wrong_name,
    **dict.fromkeys(_TYPES, _wrong_type),
    **dict.fromkeys(_BOUNDS, _out_of_range),
}
