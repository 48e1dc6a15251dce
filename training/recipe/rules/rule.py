"""The form of rules that span several fields of a recipe, and the recipe as rules read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from training.problems import Problem
from training.recipe.field_types import Word, describe_field, section_fields, section_model

MODULE_AND_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""The name of user code in a recipe: `module:name`."""


class InvalidFieldError(LookupError):
    """A rule reads an invalid field."""


class WrittenRecipe:
    """The recipe as written: `written["training.seed"]` is the field's value, or its default where it is left out. The
    false of a bare `no` in YAML is the text, as in the recipe.

    Reading a field that is known to be invalid raises InvalidFieldError.
    """

    def __init__(self, recipe: type[BaseModel], values: Mapping[str, Any], invalid: Iterable[str]) -> None:
        self._recipe, self._values, self.invalid = recipe, values, set(invalid)

    def fields(self, section: str) -> dict[str, FieldInfo]:
        """Returns a section's fields and their definitions; "" is the recipe itself."""
        return (section_fields(self._recipe, section) if section else self._recipe.model_fields) or {}

    def describe(self, name: str) -> str:
        """Returns what a field of the recipe is, on one line."""
        section, _, field = name.rpartition(".")
        model = section_model(self._recipe, section) if section else self._recipe
        return describe_field(model, field) if model else ""

    def is_written(self, name: str) -> bool:
        """Whether the recipe has the field, with any value."""
        values: Any = self._values
        for part in name.split("."):
            if not isinstance(values, Mapping) or part not in values:
                return False
            values = values[part]
        return True

    def __getitem__(self, name: str) -> Any:
        section, _, field = name.rpartition(".")
        sections = [section[:end] for end in range(len(section) + 1) if section[end : end + 1] in (".", "")]
        if any(place in sections or re.match(rf"{re.escape(name)}($|[.\[])", place) for place in self.invalid):
            raise InvalidFieldError(name)
        values: Any = self._values
        for part in filter(None, section.split(".")):
            values = (values.get(part) or {}) if isinstance(values, Mapping) else {}
        if field not in values:
            return self.fields(section)[field].get_default(call_default_factory=True)
        is_word = values[field] is False and Word in self.fields(section)[field].metadata
        return "no" if is_word else values[field]


Rule: TypeAlias = Callable[[WrittenRecipe], Iterator[tuple[str, str]]]
"""Yields each broken field with a message: the value, the allowed values, the next step."""


def broken_rules(rules: Iterable[Rule], written: WrittenRecipe) -> list[Problem]:
    """Returns the problems of all rules, in order.

    A rule ends when it reads a field that is known to be invalid, so each mistake is reported once.
    """
    problems: list[Problem] = []
    for rule in rules:
        try:
            for where, message in rule(written):
                problems.append(Problem(kind="recipe", where=where, message=message))
                written.invalid.add(where)
        except InvalidFieldError:
            continue
    return problems
