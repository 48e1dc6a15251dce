"""What a recipe asks of its source: which column is which to the task type."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from training.recipe.column_types import Column, Form, RowSpecification

if TYPE_CHECKING:
    from training.recipe.fields import Data

TEXTS = ("text", "text_pair")
"""What the columns of data.text are to the task type, in turn."""
OWN_FIELDS = {"text": "data.text", "text_pair": "data.text", "label": "data.label"}
"""The columns that have a field of their own in the recipe; data.columns has the others."""


@dataclass(frozen=True)
class Stored:
    """A column that is stored."""

    name: str
    """What it is to the task type, and what it is called where it is stored."""
    of: str
    """What the recipe calls it: the name of the source's column, once it is renamed."""
    form: Form
    field: str
    """The recipe's field for it."""
    may_be_empty: bool = False
    """Whether rows may have nothing in it."""
    target: bool = False
    """Whether it is what the model shall say, though no label."""

    @property
    def is_label(self) -> bool:
        """Whether it is what the model shall say, rather than what it is shown."""
        return self.target or self.name == "label" or self.form in ("label", "labels")


@dataclass(frozen=True)
class Asked:
    """What is asked of the source of rows."""

    data: Data
    task_type: RowSpecification
    evaluated: tuple[str, ...] = ()
    """The splits that the recipe evaluates."""

    @cached_property
    def columns(self) -> tuple[Stored, ...]:
        """The columns that are stored, in order."""
        return stored(self.task_type, named(self.data.text, self.data.label, self.data.columns))

    @property
    def inputs(self) -> tuple[Stored, ...]:
        """Those that the model is shown."""
        return tuple(column for column in self.columns if not column.is_label)

    @property
    def contents(self) -> tuple[Stored, ...]:
        """Those and the others that are no label."""
        return tuple(column for column in self.columns if column.target or not column.is_label)

    @property
    def texts(self) -> list[str]:
        """What the columns are called that hold texts which the model is shown, or shall say."""
        return [column.name for column in self.contents if column.form != "number"]

    @property
    def labels(self) -> Stored | None:
        """That of labels' names; None for a task type without."""
        return next((column for column in self.columns if column.form in ("label", "labels")), None)

    @cached_property
    def by_source(self) -> dict[str, Stored]:
        """The columns that are stored, by what the recipe calls them."""
        return {column.of: column for column in self.columns}

    @cached_property
    def casts(self) -> dict[str, str]:
        """The types of columns that are to be other than they are stored in the source, by the recipe's names."""
        return {column.of: "float64" for column in self.columns if column.form == "number"} | self.data.cast

    def unasked(self, there: Collection[str]) -> list[str]:
        """The columns that the task type would take and that are there under its own names, though the recipe does not
        name them."""
        given = named(self.data.text, self.data.label, self.data.columns)
        wanted = chosen(self.task_type, given) or {}
        return [name for name in wanted if name in there and name not in (*given, *OWN_FIELDS, *self.by_source)]

    def cast_to(self, of: str) -> str:
        """What a cast column is to hold, in words."""
        return self.data.cast.get(of, "finite number")

    def form_of(self, of: str) -> Form | None:
        """The form of a column by the recipe's name; None for one that is read for the filter alone."""
        return self.by_source[of].form if of in self.by_source else None


def named(text: Sequence[str] | None, label: str | None, columns: Mapping[str, str]) -> dict[str, str]:
    """The columns that a recipe names, by what they are to the task type."""
    found = dict(zip(TEXTS, text or (), strict=False))
    return found | ({} if label is None else {"label": label}) | dict(columns)


def chosen(task_type: RowSpecification, names: Collection[str]) -> Mapping[str, Column] | None:
    """The first of the task type's sets of columns that has all of these; None where there is none."""
    return next((one for one in task_type.column_sets() if one.keys() >= set(names)), None)


def stored(task_type: RowSpecification, given: Mapping[str, str]) -> tuple[Stored, ...]:
    """The columns that are stored where the recipe names `given`, which go together."""
    return tuple(
        Stored(
            name,
            given.get(name, name),
            column.form,
            OWN_FIELDS.get(name, f"data.columns.{name}"),
            column.may_be_empty,
            column.target,
        )
        for name, column in (chosen(task_type, given) or {}).items()
        if name in given or not column.optional
    )
