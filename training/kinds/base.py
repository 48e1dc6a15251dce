"""What a task kind is: all in which one kind differs from another, from the columns of its rows to its answers.

Light to import, like every module of a kind at its top: recipes are checked against a kind before anything is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

    from training.batching import PadToLongest

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

    @abstractmethod
    def predictions(self, logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int64]:
        """(N, L) logits to (N,) label indices."""

    @abstractmethod
    def probabilities(self, logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """(N, L) logits to (N, L) probabilities."""
