"""The settings of a training: of training.programs.fit, and of training.programs.estimate, which trains nothing.

The sections of the recipe that a training needs are the recipe's own models.
"""

from __future__ import annotations

from training.jobs.protocol import Settings, TaskSettings
from training.recipe.fields import ResolvedCompute, Training


class HubModel(Settings):
    """A base model on the Hub."""

    path: str
    revision: str


class FitSettings(TaskSettings):
    """The settings of a training."""

    labels: list[str]
    """Names, in the order of their indices."""
    max_length: int
    """Tokens a row."""
    training: Training
    compute: ResolvedCompute
    metrics: list[str]
    """Computed at each evaluation."""
    attn_implementation: str | None = None
    """model.attn_implementation."""
    base: HubModel | None = None
    """Named in an exported adapter (training.lora); None if the base model is not from the Hub."""
    micro_batch_divisor: int = 1
    """Divides the recipe's batch sizes, so that a batch fits into memory; the global batch size stays."""
