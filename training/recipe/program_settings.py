"""The settings of each program in its job.json: the stage builds the model, and the program validates it again.

The sections of the recipe that a program needs are the recipe's own models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from training.jobs.protocol import NotInKey, Settings
from training.problems import Problem
from training.recipe.fields import ResolvedCompute, Training
from training.recipe.lora import Lora
from training.recipe.tables.checks import Level


class TaskSettings(Settings):
    """The task type, which most programs need."""

    task: str
    options: dict[str, Any] = Field(default_factory=dict)


class HubModel(Settings):
    """A base model on the Hub."""

    path: str
    revision: str


class FitSettings(TaskSettings):
    """Of training.programs.fit and training.programs.estimate."""

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


class CheckModelSettings(TaskSettings):
    """Of training.programs.check_model."""

    labels: list[str]
    """Names, or stand-ins for them."""
    max_length: int
    """Tokens a row."""
    lora: Lora | None
    attn_implementation: str | None = None
    """model.attn_implementation."""
    use_liger_kernel: bool = False
    """training.use_liger_kernel."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """The number format of the run."""
    exports: list[str] = Field(default_factory=list)
    """release.exports, if the packages for them are installed."""
    config: dict[str, Any]
    """The content of config.json, or `model.config`."""
    weights: dict[str, list[int]] | None = None
    """The shape of each tensor in the model's files, by name; None if they are not on this machine."""
    field: str
    """The recipe's field that names the model."""


class CheckedModel(Settings):
    """What training.programs.check_model found that does not end a run."""

    notes: list[str] = Field(default_factory=list)
    warnings: list[Problem] = Field(default_factory=list)
    vocab_size: int | None = None
    """The rows of the model's embedding; None if it has none."""


class CreateModelSettings(Settings):
    """Of training.programs.create_model."""

    config: dict[str, Any]
    """The configuration of transformers, with model_type and vocab_size (upper bound, tokens)."""
    seed: int
    texts: list[str]
    """The columns with texts, or lists of texts, that the vocabulary is learnt from."""
    writes: bool
    """Whether the model generates text."""


class TokenizeSettings(TaskSettings):
    """Of training.programs.tokenize_with_transformers."""

    max_length: int
    """Tokens a row."""
    level: Level
    """Severity of a truncated row."""
    vocab_size: int | None = None
    """The tokens that the model has, if known."""


class PredictSettings(TaskSettings):
    """Of training.programs.predict."""

    splits: list[str]
    answered_prompts: int = 0
    """Prompts of each split that the model and its base model answer."""
    batch_size: int
    """Rows of all processes together."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    micro_batch_divisor: Annotated[int, NotInKey("its parts have the same rows")] = 1
    """Divides the batch size, so that a batch fits into memory."""


class ReferenceSettings(TaskSettings):
    """Of training.programs.reference_logprobs."""

    batch_size: int
    """Rows of all processes together."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    micro_batch_divisor: Annotated[int, NotInKey("its parts have the same rows")] = 1
    """Divides the batch size, so that a batch fits into memory."""


class PredictChampionSettings(TaskSettings):
    """Of training.programs.predict_champion."""

    split: str
    labels: list[str]
    """Today's names, in the order of their indices."""
    champion: str
    """NAME/VERSION"""
    max_length: int
    """Tokens a row."""
    answered_prompts: int = 0
    """Prompts that the champion answers."""
    batch_size: int
    """Rows of all processes together."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    micro_batch_divisor: int = 1
    """Divides the batch size, so that a batch fits into memory."""


class WantedShard(Settings):
    """Rows of a file that are predicted together."""

    file: str
    number: int
    """Its place among the file's shards, from 0."""
    digest: str
    """Of the model's inputs in its usable rows."""


class PredictShardsSettings(TaskSettings):
    """Of training.programs.predict_shards."""

    columns: dict[str, str]
    """The rows' names for the columns that the model reads, by the task type's."""
    reading: dict[str, Any] = Field(default_factory=dict)
    """How rows are read: training.recipe.reading_rules.ReadingRules."""
    shards: list[WantedShard]
    """The shards to predict, file by file."""
    shard_rows: int
    max_length: int
    """Tokens a row."""
    batch_size: int
    """Rows in one forward pass."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    micro_batch_divisor: int = 1
    """Divides the batch size, so that a batch fits into memory."""


class ChatSettings(TaskSettings):
    """Of training.programs.chat."""

    max_length: int
    """Tokens of a prompt."""
    mixed_precision: Literal["no", "bf16", "fp16"]


class ScoreSettings(TaskSettings):
    """Of training.programs.score."""

    splits: list[str]
    metrics: list[str]
    slices: list[str]
    """Columns, `label` or `length_bucket`."""
    each: list[str]
    """The slices with a floor for each group: every group of these has figures."""
    named: dict[str, list[str]]
    """Groups that a floor names, by slice; these are always shown."""
    fewest_rows: int
    """Groups with fewer rows have no intervals."""
    most_groups: int
    """The largest groups of a slice that are shown: they are drawn, and have intervals."""


class CompareSettings(TaskSettings):
    """Of training.programs.compare."""

    split: str
    labels: list[str]
    """Names, in the order of their indices."""
    metrics: list[str]
    figure: str
    """The figure that is compared: one that the metrics give, or a metric, for its first figure."""
    less_is_better: list[str]
    """User figures for which lower is better; the direction of the project's is in their table."""
    margin: float
    """The gain that the new model must exceed, in the unit of the figure."""
    confidence: float
    """1 - the chance of a false promotion."""
    champion: str | None
    """NAME/VERSION; None: the baseline."""
    judge: str | None = None
    """evaluation.judge, which compares the answers of both models."""
    lengths: bool = False
    """Whether the lengths of both models' answers are reported too."""
    warnings: list[str] = Field(default_factory=list)
    """Differences between the labels of the two models."""


class ExportSettings(Settings):
    """Of training.programs.export_onnx."""

    auto_class: str
    """The class of transformers that loads the model."""
    exports: list[str]
    """Formats."""


class CompareExportsSettings(CompareSettings):
    """Of training.programs.compare_exports. `margin` is negative: the loss that an export may have, with a minus."""

    exports: list[str]
    """Formats."""
    batch_size: int
    """Rows in one forward pass."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    """The number format in which the model's own speed is measured."""
