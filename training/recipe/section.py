"""The base of a recipe's sections, and the types that several of their fields share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import core_schema

from training.recipe.error_messages import LIST, MAPPING, NUMBER, WORD

Split = Literal["train", "validation", "test"]
# YAML 1.1 reads a bare `no` as false.
Word = BeforeValidator(lambda value: "no" if value is False else value)
AutoOrCount = Annotated[
    Annotated[Literal["auto"], Tag(WORD)] | Annotated[int, Field(ge=1), Tag(NUMBER)],
    Discriminator(lambda value: WORD if isinstance(value, str) else NUMBER),
]
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
    """A frozen model without other fields. Strict, so `true` is no number and `"3"` no whole number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


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
