"""The fields of a recipe that name code, and their values in a given recipe.

Fields are marked in their declarations, by `CodeName` or `RunsCode` (section.py). Nothing that a recipe names is
imported here, so a recipe can be inspected before any of its code runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from training.recipe.error_messages import section_of
from training.recipe.section import RunsCode


def code_fields(recipe: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted names of all marked fields."""
    for name, field in recipe.model_fields.items():
        if inside := section_of(field):
            yield from code_fields(inside, f"{above}{name}.")
        elif _is_marked(field):
            yield above + name


def named_code(recipe: type[BaseModel], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field of the recipe's values that names or permits code, with its value. The values need not be valid."""
    for name in code_fields(recipe):
        for place, found, section in _values_at(values, name.split(".")):
            # `module://name` would be imported too, so only the path of rows that are no Python object may be a URL.
            of_files = name.endswith(".path") and section.get("source", "python") != "python"
            yield from ((place, value) for value in _find_code(found) if not (of_files and "://" in value))


def _values_at(
    values: Any, path: Sequence[str], place: str = "", section: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yields the value at a path with its place and the section that has it; several if a section on the way is a list
    of sections."""
    if isinstance(values, list) and path:
        for index, inside in enumerate(values):
            yield from _values_at(inside, path, f"{place}[{index}]", section)
    elif not path:
        yield place, values, section
    elif isinstance(values, Mapping):
        yield from _values_at(values.get(path[0]), path[1:], f"{place}.{path[0]}".lstrip("."), values)


def _find_code(value: Any) -> Iterator[str]:
    if value is True:
        yield "true"
    elif isinstance(value, str):
        if ":" in value:  # module:name or hub:…
            yield value
    elif isinstance(value, Mapping):
        yield from _find_code([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _find_code(inside)


def _is_marked(field: FieldInfo) -> bool:
    return any(isinstance(mark, RunsCode) for mark in [*field.metadata, *_find_marks(field.annotation)])


def _find_marks(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for inside in get_args(annotation):
        yield from _find_marks(inside)
