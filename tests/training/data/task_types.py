"""Task types for tests of rows: that of sequence classification, and some with columns of other forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from training.recipe.column_types import Column, RowSpecification
from training.task_types.sequence_classification import SequenceClassification

if TYPE_CHECKING:
    import pyarrow as pa

    from training.recipe.column_types import Mask

CLASSIFICATION = SequenceClassification()


class Tags(RowSpecification):
    """Words, and as many tags."""

    columns: ClassVar = {"words": Column("texts"), "tags": Column("labels")}
    checks: ClassVar = {"uneven": "error"}

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask]]:
        import pyarrow.compute as pc

        words, tags = (pc.list_value_length(rows.column(name)) for name in ("words", "tags"))
        uneven = pc.not_equal(words, tags).to_numpy(zero_copy_only=False)
        yield "uneven", "has more or fewer tags than words", uneven

    def label_order(self, labels: Sequence[str]) -> list[str]:
        return sorted(labels, key=lambda label: (label != "O", label))


class Rating(RowSpecification):
    """A text, and how good it is."""

    columns: ClassVar = {"text": Column("text"), "label": Column("number")}


class Chat(RowSpecification):
    """Messages; or an instruction, optionally with an input, and the output."""

    columns: ClassVar = {
        "messages": Column("value"),
        "instruction": Column("text"),
        "input": Column("text", optional=True, may_be_empty=True),
        "output": Column("text"),
    }

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        of_messages = {"messages": self.columns["messages"]}
        return of_messages, {name: column for name, column in self.columns.items() if name not in of_messages}


class Tagging(Tags, SequenceClassification):
    """A whole task type, as an author's module has one."""


class Chatting(Chat, SequenceClassification):
    """Another."""


class Lines(SequenceClassification):
    """One whose rows have no label."""

    columns: ClassVar = {"text": Column("text")}


class Mute(SequenceClassification):
    """One that cannot be made."""

    def __init__(self, options: object = None) -> None:
        raise TypeError("it wants a voice")
