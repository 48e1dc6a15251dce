"""What a task kind is: all in which one kind differs from another, from the columns of its rows to its answers.

Light to import, like every module of a kind at its top: recipes are checked against a kind before anything is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching import PadToLongest
    from training.evaluating import Batch
    from training.predicted import Predicted

Form = Literal["text", "texts", "label", "labels", "number", "value"]


@dataclass(frozen=True)
class Column:
    """A column that a kind wants of the rows."""

    form: Form
    """text: a text. texts: a list of them, such as words. label: the name of one of the labels, or a whole number.
    labels: a list of such names. number: a number. value: anything that JSON can write, such as a list of messages."""
    optional: bool = False
    """Whether rows may be without it: the recipe then does not name it."""


class Kind(ABC):
    """A task kind. One without state: every process makes its own."""

    auto_class: ClassVar[str]
    """The class of transformers that loads and creates its models; a name, for scoring needs no torch."""
    columns: ClassVar[Mapping[str, Column]]
    """What it wants of the rows, by the names under which load_data stores it. `text`, `text_pair` and `label` are
    those that data.text and data.label name; data.columns names the others, where the rows call them otherwise."""

    @abstractmethod
    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """What the model's config says about the labels, given by name in the order of their indices."""

    @abstractmethod
    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        """What makes token features into the tensors that the model takes, T a multiple of this."""

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """The forward pass of a prediction, without a loss."""
        outputs: ModelOutput = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
        return outputs

    @abstractmethod
    def answers(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """What the model makes of the B rows of a batch, a line a row, given what came of the forward pass: what is
        stored of a prediction, under names other than `row`, `label` and `tokens`."""

    @abstractmethod
    def predicted(self, answers: pa.Table, labels: Sequence[str]) -> Predicted:
        """Rows as metrics want them, from answers and, beside them, `label` as the tokens have it."""

    @abstractmethod
    def nobody(self, labels: Sequence[str]) -> Predicted:
        """No rows, as metrics want them."""

    def retold(self, answers: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """The answers, and `label` beside them, of a model that was made for the labels `theirs`, as those of one that
        was made for `labels`."""
        return answers
