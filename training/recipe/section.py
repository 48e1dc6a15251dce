"""What the sections of a recipe are made of: their base, and the types that several of their fields have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from training.recipe.closed import Closed
from training.recipe.error_messages import LIST, MAPPING, NUMBER, WORD
from training.recipe.forms import any_of

Split = Literal["train", "validation", "test"]
# YAML 1.1 reads a bare `no` as false.
Word = BeforeValidator(lambda value: "no" if value is False else value)
AutoOrCount = Annotated[
    Annotated[Literal["auto"], Tag(WORD)] | Annotated[int, Field(ge=1), Tag(NUMBER)],
    Discriminator(lambda value: WORD if isinstance(value, str) else NUMBER),
]
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class RunsCode:
    """Marks a field that names code to run, or permits such code. A recipe from elsewhere runs none of it unasked."""


CodeName = Annotated[Text, RunsCode()]
"""A name of the project's own, or `module:name`, or `hub:owner/name@COMMIT`."""
NameOrNames = Annotated[
    Annotated[Text, Tag(WORD)] | Annotated[list[Text], Field(min_length=1), Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list) else WORD),
]
_NAMES = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 2}
# A file is replaced by the names in it (files.py) before this is validated.
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


class Section(Closed):
    """A part of the recipe."""

    model_config = ConfigDict(json_schema_extra=any_of)
