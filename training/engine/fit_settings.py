"""The settings of a training, and its result: of training.programs.fit, and of training.programs.estimate, which trains
nothing.

The sections of the recipe that a training needs are the recipe's own models.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from training.jobs.protocol import NotInKey, Result, Settings, TaskSettings
from training.recipe.fields import ResolvedCompute
from training.recipe.training_fields import Training


class HubModel(Settings):
    """A base model on the Hub."""

    path: str
    revision: str


class FitSettings(TaskSettings):
    """The settings of a training."""

    labels: list[str]
    """Names, in the order of their indices."""
    evaluation_options: Annotated[dict[str, Any], NotInKey("they shape curves; others are in options")] = Field(
        default_factory=dict
    )
    """Options of the task type that evaluations read. Those that can change the weights are in `options` too."""
    max_length: Annotated[int, NotInKey("the rows are cut by now; the model must have as many positions")]
    """Tokens a row."""
    training: Training
    compute: ResolvedCompute
    metrics: Annotated[list[str], NotInKey("they are drawn as curves; others are in deciding_metrics")]
    """Computed at each evaluation."""
    deciding_metrics: list[str] = Field(default_factory=list)
    """Those of `metrics` whose values can change the weights: one that chooses the best checkpoint, or all that code of
    the user's sees."""
    attn_implementation: str | None = None
    """model.attn_implementation."""
    calibration: Annotated[dict[str, Any] | None, NotInKey("it is in the key if it chooses rows")] = None
    """The teacher's, if its thresholds choose rows without labels."""
    fold: Annotated[int | None, NotInKey("it is in the key of a fold's training")] = None
    """The fold whose rows are left out of train; None for a training on all rows."""
    base: HubModel | None = None
    """Named in an exported adapter (training.lora); None if the base model is not from the Hub."""
    micro_batch_divisor: Annotated[int, NotInKey("an optimizer step has the same rows")] = 1
    """Divides the recipe's batch sizes, so that a batch fits into memory; the global batch size stays."""


class FitResult(Result):
    """The numbers of a training."""

    trainable_parameters: int | None
    micro_batch_size: int
    """Rows."""
    steps: int
    epochs: float
    train_loss: float
    best_step: int | None
    best_metric: float | None
    train_rows_per_second: float
    train_tokens_per_second: float | None = None
    hardware_share: float | None = None
    """Of the floating-point operations that the hardware can do: training.engine.throughput."""
    estimated_memory_mb: int | None
    """Of the process that takes most, in 10^6 bytes."""
    peak_memory_mb: int
    missing_weights: int = 0
    """Weights that the base model lacks."""
