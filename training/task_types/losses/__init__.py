"""Losses, one family a module, each a function of logits and labels.

B rows of one micro-batch on one rank, T tokens, L labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

Loss: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
