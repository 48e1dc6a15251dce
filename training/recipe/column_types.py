"""What a task type says of its rows: the part of training.task_types.task_type.TaskType that load_data works by.

It stands apart, and imports neither rows nor task types: so rows stay valid whatever else a task type learns to do,
and models whatever is done to the readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from training.recipe.tables.checks import Level

    Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

Form = Literal["text", "texts", "label", "labels", "number", "value"]
EXAMPLES = {"texts": '["EU", "rejects"]', "labels": '["B-ORG", "O"]', "value": '[{"role": "user", "content": "Hi"}]'}
"""Values of the forms that are not plain, as a person writes them in JSON."""


@dataclass(frozen=True)
class Column:
    """A column that a task type wants of the rows."""

    form: Form
    """text: a text. texts: a list of them, such as words. label: the name of one of the labels, or a whole number.
    labels: a list of such names. number: a finite number. value: anything that JSON can write, such as a list of
    messages. Of a task type's columns one at most is of labels."""
    optional: bool = False
    """Whether rows may be without it: it is read where the recipe names it."""
    may_be_empty: bool = False
    """Whether a row may have nothing in it: an empty text or list is stored then, and no number or value (null)."""
    target: bool = False
    """Whether the model predicts it. Labels are targets anyway, and so is a column named `label`."""


class RowSpecification:
    """What a task type wants of its rows, and knows of them."""

    columns: ClassVar[Mapping[str, Column]]
    """What it wants of the rows, by the names under which load_data stores it: a text as string, texts as list<string>,
    a label as int64 and labels as list<int64> (places in labels.json), a number as float64, a value as string (its
    JSON). `text`, `text_pair` and `label` are those that data.text and data.label name; data.columns names the others,
    where the rows call them otherwise. What is of labels, called `label` or `said` is what the model shall say; the
    others are what it is shown: by these equal rows are found, and rows held out."""
    checks: ClassVar[Mapping[str, Level]] = {}
    """The checks of single rows that `faults` makes beside those of all task types, and what becomes of what they find
    unless `data.checks` says else."""
    generates_text: ClassVar[bool] = False
    """Whether its models write texts. One that is made from nothing then has a tokenizer that keeps texts as they are;
    else one to which case and accents make no other word."""

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        """The columns that go together, where rows may come in several ways: of these sets, each made of `columns`, the
        first counts that has all columns which the recipe names. By default there is one: all of them."""
        return (self.columns,)

    def faults(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask] | tuple[str, str, Mask, str]]:
        """What is wrong with rows that passed all other checks: one of `checks`, words that follow "row 7", such as
        "has fewer tags than words in column 'tags'", and a truth for each row; and perhaps words that follow those and
        are of the first such row, such as ": 2 tags, 3 words".

        `rows` has what is to be stored, but for labels, which are still the names that the rows have (string, and
        list<string>). It may be called with no rows.
        """
        return iter(())

    def label_order(self, labels: Sequence[str]) -> list[str] | None:
        """All these labels of the training rows in the order of the model's outputs, where neither the recipe nor the
        source names them. None for the order they come in: by value where all are whole numbers, else by spelling."""
        return None

    def incompatible_label(self, labels: Sequence[str]) -> tuple[str, str] | None:
        """One of all labels in order, whoever named them, that cannot stand beside the others, and why, in words that
        follow "label 'x'"; None where all go together."""
        return None
