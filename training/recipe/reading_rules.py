"""How the rows of a registered version are read: as its recipe read them, unless options override a field.

A version carries the fields of its recipe's `data` that shape rows. Every command that reads rows for the version uses
them: predictions, drift reports and evaluations.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from training.problems import Problem, UserError
from training.recipe.data_fields import Data
from training.recipe.field_types import ClosedModel
from training.recipe.source_columns import columns_by_role
from training.recipe.tables.formats import FORMATS, PACKED

OF_FORMAT = tuple(dict.fromkeys(field for one in FORMATS.values() for field in one.fields))
"""Fields about the bytes of a file: they hold for files of the format that the recipe read, and not for others."""
TEXT_LINES, TEXT_LINES_FIELDS = "txt", ("encoding",)
"""Files with a text a line, which only predictions read, and the fields about their bytes."""
OF_ROLES = ("text", "label", "columns")
FIELDS = ("source", *OF_FORMAT, "rename", "cast", "filter", *OF_ROLES, "label_separator", "max_file_gb", "checks")
"""The fields of `data` that shape rows."""


class ReadingRules(ClosedModel):
    """The fields of `data` by which rows are read."""

    sets: list[dict[str, Any]] = [{}]  # noqa: RUF012 (pydantic copies it)
    """Those of the recipe, of each set of a mixture: its `name`, the other `suffixes` of its files than those of its
    format, and the FIELDS that are not defaults."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Those that an option gives instead."""

    @classmethod
    def of(cls, data: Data) -> ReadingRules:
        """Returns the rules of a recipe's section `data`."""
        names = data.set_names or [""]
        shaping = [one.model_dump(mode="json", include={*FIELDS}, exclude_defaults=True) for one in data.sets]
        return cls(
            sets=[
                {"name": name, "suffixes": _other_suffixes(one), "source": one.source, **fields}
                for name, one, fields in zip(names, data.sets, shaping, strict=True)
            ]
        )

    def data(self, source: str, *, needs_filter: bool = True) -> Data:
        """Returns the section `data` for files of a format: a key of FORMATS, or TEXT_LINES.

        Raises UserError for fields that the sets of a mixture do not share. Without `needs_filter`, no row is filtered
        if the filter is one of them.
        """
        values, problems = dict[str, Any](), list[Problem]()
        for field in FIELDS[1:]:
            if field in OF_FORMAT and field not in _fields_of(source):
                continue
            if field in self.overrides:
                values[field] = self.overrides[field]
                continue
            sets = [one for one in self.sets if field not in OF_FORMAT or one.get("source") == source]
            try:
                values |= _shared_value(field, sets[:1] if field in OF_ROLES else sets)
            except UserError as error:
                problems += [] if field == "filter" and not needs_filter else error.problems
        if problems:
            raise UserError(problems)
        return Data.model_validate({**values, "source": "csv" if source == TEXT_LINES else source, "path": "rows"})

    def format_of(self, name: str) -> str | None:
        """Returns the format of a file by its name, or as the recipe or an option says: a key of FORMATS or TEXT_LINES.
        None if it is unknown."""
        if "source" in self.overrides:
            return str(self.overrides["source"])
        found = next((source for source, form in FORMATS.items() if name.endswith(form.suffixes)), None)
        others = {suffix: one["source"] for one in self.sets for suffix in one.get("suffixes", ())}
        found = found or next((source for suffix, source in others.items() if name.endswith(suffix)), None)
        of_text = self.folder_source or TEXT_LINES
        return of_text if found is None and name.endswith(f".{TEXT_LINES}") else found

    @property
    def folder_source(self) -> str | None:
        """The format whose rows are whole files of text, if the recipe or an option has it; else such a file has a text
        a line."""
        sets = [self.overrides] if "source" in self.overrides else self.sets
        sources = [str(one.get("source")) for one in sets]
        return next((one for one in sources if one in FORMATS and FORMATS[one].is_folder), None)

    @property
    def suffixes(self) -> list[str]:
        """The ends of the names of files that can be read."""
        known = [suffix for form in FORMATS.values() for suffix in form.suffixes]
        return [f".{TEXT_LINES}", *known, *(suffix for one in self.sets for suffix in one.get("suffixes", ()))]

    @property
    def has_filter(self) -> bool:
        """Whether rows are filtered, at least those of one set of a mixture."""
        return any(one.get("filter") for one in ([self.overrides] if "filter" in self.overrides else self.sets))

    def columns(self, known: Mapping[str, str]) -> dict[str, str]:
        """Returns the rows' names of the columns that a model reads, by role. `known` are its recipe's."""
        given = columns_by_role(self.overrides.get("text"), None, self.overrides.get("columns") or {})
        return {role: given.get(role, name) for role, name in known.items()}

    def mappings(self) -> dict[str, Any]:
        """Returns the fields of several named values, to which an option may add one."""
        found = dict[str, Any]()
        for field in ("rename", "cast", "columns", "checks"):
            with contextlib.suppress(UserError):
                found |= _shared_value(field, self.sets[:1] if field in OF_ROLES else self.sets)
        return found

    def require_used(self, sources: Iterable[str]) -> None:
        """Raises UserError for an option about a format that no file has."""
        taken = {field for source in sources for field in _fields_of(source)}
        problems = []
        for field in self.overrides:
            if field in OF_FORMAT and field not in taken:
                formats = " and ".join(name for name, one in FORMATS.items() if field in one.fields)
                message = f"is for files of {formats}, and there are none: leave it out."
                problems.append(Problem(kind="option", where=f"data.{field}", message=message))
        if problems:
            raise UserError(problems)


def _other_suffixes(data: Data) -> list[str]:
    """Returns the suffixes of the recipe's files that are not those of its format, such as .txt for tables."""
    if data.source not in FORMATS or FORMATS[data.source].is_folder:
        return []
    named = [name for names in (data.splits or {}).values() for name in ([names] if isinstance(names, str) else names)]
    paths = [path for path in (data.path, *named) if not os.path.isdir(os.path.expanduser(path))]
    names = [path.rpartition("/")[2] for path in paths]
    packed = [re.sub(rf"({'|'.join(map(re.escape, PACKED))})$", "", name) for name in names]
    others = [name for name in packed if "." in name and not name.endswith(FORMATS[data.source].suffixes)]
    found = [f".{name.rpartition('.')[2]}" for name in others]
    return [suffix for suffix in dict.fromkeys(found) if re.fullmatch(r"\.\w+", suffix)]


def _fields_of(source: str) -> tuple[str, ...]:
    return TEXT_LINES_FIELDS if source == TEXT_LINES else FORMATS[source].fields


def _shared_value(field: str, sets: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the value of a field that is the same in all sets, by its name; nothing for its default."""
    given = [(one.get("name", ""), one.get(field)) for one in sets]
    values = [value for _, value in given if value is not None]
    if not values:
        return {}
    if field == "max_file_gb":
        return {field: max(values)}
    if isinstance(values[0], Mapping):  # of columns, which one set may have and another may not
        pairs = {(key, value) for mapping in values for key, value in mapping.items()}
        if len({key for key, _ in pairs}) == len(pairs):
            return {field: {key: value for mapping in values for key, value in mapping.items()}}
    elif all(value == values[0] for _, value in given):
        return {field: values[0]}
    shown = "; ".join(f"{name}: {'the default' if value is None else repr(value)}" for name, value in given)
    message = f"differs among the sets of rows that the model was trained on ({shown}): set it for these rows."
    raise UserError.of("option", f"data.{field}", message)
