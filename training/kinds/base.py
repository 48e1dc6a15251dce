"""What a task kind is: all in which one kind differs from another, from the columns of its rows to its answers.

Light to import, like every module of a kind at its top: recipes are checked against a kind before anything is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from training.rows.columns import Column, KindOfRows

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching import PadToLongest, TokenRows
    from training.evaluating import Batch
    from training.features import Features
    from training.losses import Loss
    from training.predicted import Predicted
    from training.tokens import Encoder

__all__ = ["Column", "Kind"]


class Kind(KindOfRows, ABC):
    """A task kind. One without state: every process makes its own. What it wants of its rows: KindOfRows."""

    auto_class: ClassVar[str]
    """The class of transformers that loads and creates its models; a name, for scoring needs no torch."""

    @abstractmethod
    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """What the model's config says about the labels, given by name in the order of their indices."""

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The token features of rows as load_data stores them. By default those of their texts."""
        from training.features import of_texts

        return of_texts(encoder, rows)

    @abstractmethod
    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        """What makes token features into the tensors that the model takes, T a multiple of this."""

    def loss(
        self, training: Mapping[str, Any], labels: Sequence[str], train: TokenRows, *, outside: bool
    ) -> Loss | None:
        """The loss that the recipe's training section asks for; None for the model's own. What a model computes inside
        may be in a lower precision where it is shared: then it is `outside`, if it can be."""
        return None

    def targets(self, batch: Batch) -> int:
        """How many targets a batch's loss is the mean of: by default a row has one."""
        return len(batch["labels"])

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """The forward pass of a prediction, without a loss."""
        outputs: ModelOutput = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
        return outputs

    @abstractmethod
    def answers(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """What the model makes of the B rows of a batch, a line a row, given what came of the forward pass: what is
        stored of a prediction, under names other than `row`, `label` and `tokens`."""

    def beside_rows(self, answers: pa.Table, rows: TokenRows) -> pa.Table:
        """Answers to all of the rows, in order, as they are stored: by what the rows are made of rather than by their
        tokens, and with the `label` of each in front, where rows have one."""
        return rows.labelled(answers)

    @abstractmethod
    def predicted(self, answers: pa.Table, labels: Sequence[str]) -> Predicted:
        """Rows as metrics want them, from answers as `beside_rows` gives them."""

    @abstractmethod
    def nobody(self, labels: Sequence[str]) -> Predicted:
        """No rows, as metrics want them."""

    def retold(self, answers: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """The answers, and `label` beside them, of a model that was made for the labels `theirs`, as those of one that
        was made for `labels`."""
        return answers
