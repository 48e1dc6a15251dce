"""What a task kind is: all in which one kind differs from another, from the columns of its rows to its answers.

Light to import, like every module of a kind at its top: recipes are checked against a kind before anything is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from training.rows.columns import Column, KindOfRows

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

    from training.batching import PadToLongest

__all__ = ["Column", "Kind"]


class Kind(KindOfRows, ABC):
    """A task kind. One without state: every process makes its own. What it wants of its rows: KindOfRows."""

    auto_class: ClassVar[str]
    """The class of transformers that loads and creates its models; a name, for scoring needs no torch."""

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
