"""The columns of a recipe's rows by its task type, and the rules about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from training.problems import nearest
from training.recipe.column_types import RowSpecification
from training.recipe.rules.rule import WrittenRecipe
from training.recipe.source_columns import (
    ROLE_FIELDS,
    TEXTS,
    SourceColumns,
    StoredColumn,
    columns_by_role,
    matching_set,
    stored_columns,
)
from training.recipe.task_specification import TaskSpecification, code_modules, specification, user_code

if TYPE_CHECKING:
    from training.recipe.fields import Recipe


def source_columns(recipe: Recipe) -> SourceColumns:
    """Returns the columns that the recipe takes from the source of its rows; from the first set of a mixture."""
    return SourceColumns(recipe.data.sets[0], specification(**recipe.task_and_options), tuple(recipe.evaluation.splits))


def code_for_rows(recipe: Recipe) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    """Returns the modules of the task type's own code for rows, the recipe field of user code, and the options that the
    code reads. All are empty for most task types, which change no rows."""
    task_type = specification(**recipe.task_and_options)
    if all(
        getattr(type(task_type), name) is getattr(RowSpecification, name)
        for name in ("row_problems", "label_order", "incompatible_label")
    ):
        return [], {}, {}
    return code_modules(recipe.task), user_code(recipe.task), task_type.options_of("load_data")


def takes_template(recipe: Recipe) -> bool:
    """Whether rows of the task type may become texts by the model's chat template, which can refuse some."""
    task_type = type(specification(**recipe.task_and_options))
    return task_type.refused_rows is not RowSpecification.refused_rows


def task_type_of(written: WrittenRecipe) -> TaskSpecification:
    """Returns the recipe's task type. Raises InvalidFieldError if it is invalid."""
    return specification(written["task"], written["options"])


def columns_of(written: WrittenRecipe) -> tuple[StoredColumn, ...]:
    """Returns the stored columns. Raises InvalidFieldError if a field that names them is invalid."""
    return stored_columns(task_type_of(written), _column_names(written))


def _column_names(written: WrittenRecipe) -> dict[str, str]:
    return columns_by_role(written["data.text"], written["data.label"], written["data.columns"])


def required_columns(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """A recipe names all columns that the task type needs, and no other columns."""
    task_type, given = task_type_of(written), _column_names(written)
    for name, field in ROLE_FIELDS.items():
        if name in written["data.columns"]:
            yield f"data.columns.{name}", f"has its own field: set {field}."
            return
    unknown = [name for name in given if not any(name in columns for columns in task_type.column_sets())]
    for name in unknown:
        yield _field_of(name), _describe_unknown(name, given[name], written)
    if unknown:
        return
    if (needed := matching_set(task_type, given)) is None:
        yield "data.columns", f"{_join_names(given)} cannot be combined: {_needs(written)}."
        return
    for name, column in needed.items():
        if name in ROLE_FIELDS and name not in given and not column.optional:
            if name == TEXTS[1]:
                yield "data.text", f"{written['data.text']} is one column: {_needs(written)}."
            else:
                about = written.describe(f"data.{name}")
                yield ROLE_FIELDS[name], f"is missing: {about.partition(' (null')[0]}."


def one_role_each(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Each column has one role for the task type."""
    text = written["data.text"] or []
    if len(set(text)) < len(text):
        yield "data.text", f"{text} names a column twice; name one text column, or two different ones."
    if written["data.label"] in text:
        yield "data.label", f"{written['data.label']!r} is also a text column; the label needs another column."
    field_of_column: dict[str, str] = {}
    for column in columns_of(written):
        name = column.source_name
        if name in field_of_column:
            yield column.field, f"{name!r} is also {field_of_column[name]}: each column has one role."
        field_of_column[name] = column.field


def labels_are_named(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Label names apply only to task types with labels."""
    if written["data.label_names"] is not None and not any(
        column.form in ("label", "labels") for column in columns_of(written)
    ):
        yield (
            "data.label_names",
            f"have no effect: {_needs(written)}, and its labels have no names. Leave this field out.",
        )


def _describe_unknown(name: str, source_name: str, written: WrittenRecipe) -> str:
    if name in ROLE_FIELDS:
        role = "a second text" if name == TEXTS[1] else name
        return f"{source_name!r} has no effect as {role}: {_needs(written)}. Leave it out."
    known = [role_name for columns in task_type_of(written).column_sets() for role_name in columns]
    return f"no such column: {_needs(written)}.{nearest(name, known)}"


def _needs(written: WrittenRecipe) -> str:
    """Returns the columns of the task type: `task translation takes source, target`."""
    task_type = task_type_of(written)
    sets = [", ".join(map(_format_column, one.items())) for one in task_type.column_sets()]
    loss = getattr(task_type.options, "loss", None) if "loss" in task_type.option_stages.get("load_data", ()) else None
    task = f"task {written['task']}" + (f" of options.loss {loss}" if loss else "")
    return f"{task} takes {'; or '.join(sets)}"


def _format_column(item: tuple[str, object]) -> str:
    name, column = item
    return f"{name} (if there is one)" if getattr(column, "optional", False) else name


def _join_names(given: Mapping[str, str]) -> str:
    *before, last = given
    return f"{', '.join(before)} and {last}"


def _field_of(name: str) -> str:
    return ROLE_FIELDS.get(name, f"data.columns.{name}")
