"""The columns that a recipe takes from the source of its rows, and their roles for the task type."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from training.recipe.column_types import MODULES, Column, Form, RowSpecification
from training.recipe.filters import parse_filter

if TYPE_CHECKING:
    from training.problems import Problem
    from training.recipe.data_fields import Data

TEXTS = ("text", "text_pair")
"""The roles of the columns in data.text, in order."""
ROLE_FIELDS = {"text": "data.text", "text_pair": "data.text", "label": "data.label"}
"""The roles whose columns have their own recipe field; data.columns names the columns of all other roles."""
CAST_FORMS: Mapping[str, str] = {"number": "float64", "boolean": "bool"}
"""The forms whose columns are cast, and their types."""
WITHOUT_TEXT = (*CAST_FORMS, "image")
"""The forms whose columns have no text."""


@dataclass(frozen=True)
class StoredColumn:
    """One column that load_data stores."""

    name: str
    """Its role for the task type, and its name in the stored file."""
    source_name: str
    """Its name in the source, after data.rename."""
    form: Form
    field: str
    """The recipe field that names it."""
    may_be_empty: bool = False
    """Whether rows may have no value in it."""
    target: bool = False
    """Whether it is a target other than a label, such as a text to generate."""

    @property
    def is_label(self) -> bool:
        """Whether it holds labels, or numbers to predict in their place."""
        return self.name == "label" or self.form in ("label", "labels")

    @property
    def is_correctable(self) -> bool:
        """Whether data.corrections may change it."""
        return self.is_label and self.form in ("label", "labels", "number")

    @property
    def is_target(self) -> bool:
        """Whether the model predicts it. All other columns are inputs."""
        return self.target or self.is_label


@dataclass(frozen=True)
class SourceColumns:
    """The columns that a recipe takes from its source, with the rest of its data section."""

    data: Data
    task_type: RowSpecification
    evaluated: tuple[str, ...] = ()
    """The splits that the recipe evaluates."""
    image_folder: str | None = None
    """The folder from which paths of images start; None if rows must hold the images themselves."""

    keeps_rows: ClassVar[bool] = False
    """Whether each row of a file keeps its place, although all columns that are read are empty."""

    def in_file(self, there: Sequence[str]) -> SourceColumns:
        """Returns the columns to read from a file that has the columns `there`."""
        return self

    def other_problems(self, there: Sequence[str], where: str) -> list[Problem]:
        """Returns the problems of a file's columns beside those that are read."""
        return []

    @cached_property
    def columns(self) -> tuple[StoredColumn, ...]:
        """The stored columns, in order."""
        return stored_columns(self.task_type, columns_by_role(self.data.text, self.data.label, self.data.columns))

    @property
    def inputs(self) -> tuple[StoredColumn, ...]:
        """The columns that the model reads."""
        return tuple(column for column in self.columns if not column.is_target)

    @property
    def contents(self) -> tuple[StoredColumn, ...]:
        """All columns except labels."""
        return tuple(column for column in self.columns if column.target or not column.is_label)

    @property
    def has_images(self) -> bool:
        """Whether a column has images, of which few rows fill the memory."""
        return any(column.form == "image" for column in self.columns)

    @property
    def modules(self) -> list[str]:
        """The modules that read the values of only some forms."""
        return list(dict.fromkeys(MODULES[column.form] for column in self.columns if column.form in MODULES))

    @property
    def texts(self) -> list[str]:
        """The names of the columns of text."""
        return [column.name for column in self.contents if column.form not in WITHOUT_TEXT]

    @property
    def labels(self) -> StoredColumn | None:
        """The column of label names; None for a task type without one."""
        return next((column for column in self.columns if column.form in ("label", "labels")), None)

    @property
    def correctable(self) -> StoredColumn | None:
        """The column that data.corrections changes; None for a task type without labels and numbers."""
        return next((column for column in self.columns if column.is_correctable), None)

    @cached_property
    def by_source(self) -> dict[str, StoredColumn]:
        """The stored columns by their names in the source."""
        return {column.source_name: column for column in self.columns}

    @cached_property
    def names(self) -> list[str]:
        """The columns to read, by their names in the source: the stored columns, and those of data.filter and
        data.split."""
        return list(dict.fromkeys([*self.by_source, *self.filtered, *filter(None, [self.split_column])]))

    @cached_property
    def filtered(self) -> tuple[str, ...]:
        """The columns of data.filter."""
        return parse_filter(self.data.filter).columns if self.data.filter else ()

    @property
    def split_column(self) -> str | None:
        """The column by which rows are held out; None if they are by their texts."""
        split = self.data.split
        return None if split is None or split.by == "rows" else split.column

    @cached_property
    def of_any_type(self) -> str | None:
        """The column of data.split, if it is only read for that: its values may be of several types."""
        name = self.split_column
        return None if name in (*self.by_source, *self.filtered, *self.data.cast) else name

    def field_of(self, name: str) -> str:
        """The recipe field that names a column to read."""
        if name in self.by_source:
            return self.by_source[name].field
        return "data.filter" if name in self.filtered else "data.split.column"

    @cached_property
    def source_names(self) -> dict[str, str]:
        """The source's own names of the columns to read, by their names after data.rename."""
        old_names = {new: old for old, new in self.data.rename.items()}
        return {name: old_names.get(name, name) for name in self.names}

    @cached_property
    def casts(self) -> dict[str, str]:
        """The types to cast columns to, by their names in the source."""
        by_form = {name: CAST_FORMS.get(column.form) for name, column in self.by_source.items()}
        return {name: to for name, to in by_form.items() if to} | self.data.cast

    def unnamed(self, available: Collection[str]) -> list[str]:
        """The optional roles for which the recipe names no column although the source has one of that name."""
        named = columns_by_role(self.data.text, self.data.label, self.data.columns)
        roles = matching_set(self.task_type, named) or {}
        return [name for name in roles if name in available and name not in (*named, *ROLE_FIELDS, *self.by_source)]

    def cast_in_words(self, source_name: str) -> str:
        """The type that a column is cast to, for messages."""
        usual = "true or false" if self.form_of(source_name) == "boolean" else "finite number"
        return self.data.cast.get(source_name, usual)

    def form_of(self, source_name: str) -> Form | None:
        """The form of a column; None for one that only data.filter or data.split reads."""
        return self.by_source[source_name].form if source_name in self.by_source else None


def columns_by_role(text: Sequence[str] | None, label: str | None, columns: Mapping[str, str]) -> dict[str, str]:
    """Returns the source's column of each role that a recipe names."""
    roles = dict(zip(TEXTS, text or (), strict=False))
    return roles | ({} if label is None else {"label": label}) | dict(columns)


def matching_set(task_type: RowSpecification, roles: Collection[str]) -> Mapping[str, Column] | None:
    """Returns the first of the task type's column sets with all these roles; None if there is none."""
    return next((columns for columns in task_type.column_sets() if columns.keys() >= set(roles)), None)


def stored_columns(task_type: RowSpecification, given: Mapping[str, str]) -> tuple[StoredColumn, ...]:
    """Returns the stored columns of a recipe that names the columns `given`, by role."""
    return tuple(
        StoredColumn(
            name,
            given.get(name, name),
            column.form,
            ROLE_FIELDS.get(name, f"data.columns.{name}"),
            column.may_be_empty,
            column.target,
        )
        for name, column in (matching_set(task_type, given) or {}).items()
        if name in given or not column.optional
    )
