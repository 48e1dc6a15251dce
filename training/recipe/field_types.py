"""The base of a recipe's sections, the types that several of their fields share, and the fields by their dotted names.

Fields that name code are marked in their declarations, by `CodeName` or `RunsCode`. Nothing that a recipe names is
imported here, so a recipe can be inspected before any of its code runs.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

# Tags of the types that a field accepts, so that only the mistakes of one type are reported.
WORD, NUMBER, LIST, MAPPING = "[word]", "[number]", "[list]", "[mapping]"
INDEX = re.compile(r"\[\d+\]")

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# YAML 1.1 reads a bare `no` as false.
Word = BeforeValidator(lambda value: "no" if value is False else value)
AutoOrCount = Annotated[
    Annotated[Literal["auto"], Tag(WORD)] | Annotated[int, Field(ge=1), Tag(NUMBER)],
    Discriminator(lambda value: WORD if isinstance(value, str) else NUMBER),
]
ABSTAIN = "abstain"
Confidence = Annotated[
    Annotated[Literal["abstain"], Tag(WORD)] | Annotated[float, Field(gt=0, lt=1), Tag(NUMBER)],
    Discriminator(lambda value: WORD if isinstance(value, str) else NUMBER),
]
"""A probability, or the thresholds below which a version gives rows to a person."""
Text = Annotated[str, Field(min_length=1)]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""The name of a set in a mixture."""


class NameIn:
    """Restricts a text to a table's names; pydantic validates it like a Literal of these names."""

    def __init__(self, table: Iterable[str]) -> None:
        self.names = list(table)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.literal_schema(self.names)


@dataclass(frozen=True)
class RunsCode:
    """Marks a field that names code to run, or permits such code. In a recipe from elsewhere it needs consent."""


CodeName = Annotated[Text, RunsCode()]
"""A name from the project's tables, or `module:name`, or `hub:owner/name@COMMIT`."""
NameOrNames = Annotated[
    Annotated[Text, Tag(WORD)] | Annotated[list[Text], Field(min_length=1), Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list) else WORD),
]
_NAMES = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 2}
# referenced_files.py replaces a file by its names before validation.
NamesOrFile = Annotated[
    list[Text],
    Field(min_length=2),
    WithJsonSchema({"anyOf": [_NAMES, {"type": "string", "minLength": 1}]}),
]
BalancedOrWeights = Annotated[
    Annotated[Literal["balanced"], Tag(WORD)]
    | Annotated[dict[Text, Annotated[float, Field(gt=0)]], Field(min_length=1), Tag(MAPPING)],
    Discriminator(lambda value: MAPPING if isinstance(value, dict) else WORD),
]
PathOrMapping = Annotated[
    Annotated[Text, Tag(WORD)] | Annotated[dict[str, Any], Tag(MAPPING)],
    Discriminator(lambda value: WORD if isinstance(value, str) else MAPPING),
]
ColumnType = Literal["string", "int64", "float64", "bool"]


class ClosedModel(BaseModel):
    """A frozen model without other fields. Strict, so `true` is no number and `"3"` no whole number.

    The JSON schema has the docstrings of its fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # Not by pydantic's use_attribute_docstrings, which reads the source of each class while it is imported.
        found = handler(schema)
        for name, field in handler.resolve_ref_schema(found).get("properties", {}).items():
            text = _docstrings(cls).get(name)
            if text and ("$ref" not in field or handler.resolve_ref_schema(field).get("description") != text):
                field.setdefault("description", text)
        return found


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring of each field that has one, by the field's name."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if not issubclass(one, BaseModel) or one.__module__.partition(".")[0] == "pydantic":
            continue
        for field, text in itertools.pairwise(_class_bodies(one.__module__).get(one.__qualname__, [])):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found.pop(field.target.id, None)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """The statements of each class of a module, by its qualified name; none without its source. `inspect.getsource`
    would parse the whole file for each class."""
    try:
        outer = [("", ast.parse(inspect.getsource(sys.modules[module])).body)]
    except (KeyError, OSError):
        return {}
    found: dict[str, list[ast.stmt]] = {}
    for prefix, body in outer:
        inner = {prefix + node.name: node.body for node in body if isinstance(node, ast.ClassDef)}
        outer += [(f"{name}.", body) for name, body in inner.items()]
        found |= inner
    return found


def describe_field(model: type[BaseModel], field: str) -> str:
    """The docstring of a field on one line; empty without one."""
    return " ".join(_docstrings(model).get(field, "").split())


def _any_of(schema: Any) -> None:
    """Replaces `oneOf` by a flat `anyOf`: Prefect's form shows the choices of one level of `anyOf`, and no `oneOf`."""
    for child in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(child, dict | list):
            _any_of(child)
    if isinstance(schema, dict) and "oneOf" in schema:
        schema["anyOf"] = schema.pop("oneOf")
    if isinstance(schema, dict) and "anyOf" in schema:
        schema["anyOf"] = [
            choice for alternative in schema["anyOf"] for choice in alternative.get("anyOf", [alternative])
        ]


class Section(ClosedModel):
    """A part of the recipe."""

    model_config = ConfigDict(json_schema_extra=_any_of)


def field_name(loc: Sequence[int | str]) -> str:
    """Returns the field at a location as the user writes it: `("data", "text", 0)` is `data.text[0]`."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("[key]", WORD, NUMBER, LIST, MAPPING):  # "[key]": pydantic's mark of a mapping's key
            name += f".{part}" if name else part
    return name


def section_model(recipe: type[BaseModel], section: str) -> type[BaseModel] | None:
    """Returns the model of a section of the recipe, such as `release.gate`; None if the name is not a section."""
    model: type[BaseModel] | None = recipe
    for name in INDEX.sub("", section).split("."):
        field = model.model_fields.get(name) if model else None
        model = section_of(field) if field else None
    return model


def section_fields(recipe: type[BaseModel], section: str) -> dict[str, FieldInfo] | None:
    """Returns the fields of a section of the recipe; None if the name is not a section."""
    model = section_model(recipe, section)
    return model.model_fields if model else None


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the model of a field that is a section or a list of sections, or may be one; None for a plain value."""
    kinds = [field.annotation, *get_args(field.annotation)]
    kinds += [inside for kind in kinds if get_origin(kind) is list for inside in get_args(kind)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def is_list_of_sections(field: FieldInfo) -> bool:
    """Whether a field takes a list of sections."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return section_of(field) is not None and any(get_origin(kind) is list for kind in kinds)


def sections(recipe: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yields the names of all sections, each before its subsections."""
    for name, field in recipe.model_fields.items():
        if model := section_of(field):
            yield prefix + name
            yield from sections(model, f"{prefix}{name}.")


def code_fields(recipe: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted names of all fields that name code."""
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


VERSION_NAME = re.compile(r"[^@/]+(@[^@/]+|/[1-9]\d*)?")
"""The forms of the name."""


class VersionName(NamedTuple):
    """The parts of a name; alias and version are empty if they are not given."""

    name: str
    alias: str
    version: str


def split_version_name(text: str) -> VersionName:
    """Splits `NAME`, `NAME@alias` or `NAME/version` into its parts."""
    name, at, alias = text.partition("@")
    name, _, version = (name, "", "") if at else name.partition("/")
    return VersionName(name, alias, version)
