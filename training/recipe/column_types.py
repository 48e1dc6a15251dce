"""The columns of a task type and its checks of rows: the part of TaskType that load_data reads.

It imports neither readers nor task types. So an edit to a task type's other code leaves stored rows valid, and an edit
to a reader leaves models valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from training.recipe.tables.row_checks import Level

    Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

Form = Literal["text", "texts", "label", "labels", "number", "boolean", "value", "content", "image"]
_MESSAGES = '[{"role": "user", "content": "Hi"}]'
EXAMPLES = {"texts": '["EU", "rejects"]', "labels": '["B-ORG", "O"]', "value": _MESSAGES, "content": _MESSAGES}
"""Values of the nested forms, as a person writes them in JSON."""
MODULES: Mapping[Form, str] = {"image": "training.data.images"}
"""Modules that read the values of one form. They are imported by name, so that their code counts only for stages whose
rows have that form: load_data names them, others reach them by the module of the task type."""

BESIDE_CONVERSATIONS = {
    **dict.fromkeys(("system", "system_prompt"), "write its text as the first message, by 'system', or in the prompt"),
    "history": "write its turns as messages before the question, or in the prompt",
    "tools": "describe the tools in a message by 'system', or in the prompt",
    "functions": "set data.rename to {functions: tools} and data.columns.tools to tools",
}
"""Columns that belong to conversations in other tools: `unread_columns` of the task types that learn from them."""


@dataclass(frozen=True)
class Column:
    """A column of a task type's rows."""

    form: Form
    """text: a text. texts: a list of texts, such as words. label: the name of a label, or a whole number. labels: a
    list of names of labels. number: a finite number. boolean: true or false, also as 1 or 0. value: any JSON value,
    such as a list of messages. content: a text or a list of messages; a cell of CSV is a text unless it begins with
    `[{`. image: the path of a file, the file's bytes, or an object of `bytes` and `path`. At most one column of a
    task type has the form label or labels."""
    optional: bool = False
    """Whether rows may lack the column. It is read if the recipe names it."""
    may_be_empty: bool = False
    """Whether a value may be empty. An empty text or list is stored as such, a missing number or value as null."""
    target: bool = False
    """Whether the model predicts it. Labels are targets anyway, and so is a column named `label`."""
    advice: str = ""
    """A sentence for rows that lack the column."""


def module_of(form: Form) -> Any:
    """Returns the form's own module."""
    return import_module(MODULES[form])


class RowSpecification:
    """The columns of a task type's rows, and its rules for their values."""

    columns: ClassVar[Mapping[str, Column]]
    """The columns, by the names under which load_data stores them: a text as string, texts as list<string>, a label as
    int64 and labels as list<int64> (indices into labels.json), a number as float64, a boolean as bool, a value and a
    content as string (their JSON), an image as string (the base64 of its file).

    data.text and data.label name the sources of `text`, `text_pair` and `label`; data.columns those of the others.
    Columns that are no targets are the model's inputs: rows are duplicates if these are equal, and rows are held out by
    them."""

    # Rarer

    checks: ClassVar[Mapping[str, Level]] = {}
    """The task type's own checks of single rows, made by `row_problems`, with their default levels in `data.checks`."""
    unread_columns: ClassVar[Mapping[str, str]] = {}
    """Columns that rows of this kind have in other tools and that the task type does not read, each with the way to
    write its content. A source with such a column is refused unless the recipe renames it."""
    repeats_inputs: ClassVar[bool] = False
    """Whether several rows may have the same inputs, such as a question with several answers: rows are then duplicates
    only if their targets are equal too."""
    takes_documents: ClassVar[bool] = False
    """Whether a text may be a whole document, because it is cut into blocks of tokens."""
    sentinels: ClassVar[int] = 0
    """The tokens for missing spans of a text that a new tokenizer gets: training.tokenization.special_tokens."""
    generates_text: ClassVar[bool] = False
    """Whether its models generate text. A tokenizer that is made from scratch then keeps case and accents."""

    @classmethod
    def reads_images(cls) -> bool:
        """Whether a column has images, which an image processor prepares in place of a tokenizer."""
        return bool(cls.image_columns())

    @classmethod
    def image_columns(cls) -> list[str]:
        """The columns with images."""
        return [name for name, column in cls.columns.items() if column.form == "image"]

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        """The alternative sets of columns that rows may have, each a subset of `columns`. The first set that has all
        columns named by the recipe is used. The default is one set with all columns."""
        return (self.columns,)

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask] | tuple[str, str, Mask, str]]:
        """The problems of rows that passed all other checks.

        Each is one of `checks`; words that follow "row 7", such as "has fewer tags than words in column 'tags'"; a mask
        of the rows; and optionally words on the first such row, such as ": 2 tags, 3 words". `rows` has the columns to
        be stored, with labels still as names (string and list<string>). It may have no rows.
        """
        return iter(())

    def refused_rows(self, template: Any, rows: pa.RecordBatch) -> Iterator[tuple[str, Mask]]:
        """Reasons for which the model's chat template, a training.tokenization.chat_templates.ChatTemplate, cannot
        write some of the rows, each with a mask of these rows. By default none: rows need no template."""
        return iter(())

    def label_order(self, labels: Sequence[str]) -> list[str] | None:
        """The training rows' labels in the order of the model's outputs, if neither the recipe nor the source orders
        them. With None they are sorted: by value if all are whole numbers, else by spelling."""
        return None

    def incompatible_label(self, labels: Sequence[str]) -> tuple[str, str] | None:
        """A label that is incompatible with the others, and the reason, in words that follow "label 'x'"; None if all
        are compatible."""
        return None
