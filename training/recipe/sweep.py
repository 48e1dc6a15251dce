"""The settings of a sweep: the fields to search, by which sampler and pruner, and for how long."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from training.recipe.error_messages import MAPPING, WORD
from training.recipe.section import Section, Text

NameOrSettings = Annotated[
    Annotated[Text, Tag(WORD)] | Annotated[dict[str, Any], Tag(MAPPING)],
    Discriminator(lambda value: MAPPING if isinstance(value, dict) else WORD),
]
"""A name from a table, or `{name: …}` with settings."""
Number = int | float


class Parameter(Section):
    """The values of one field to search: exactly one of log, range and choice."""

    log: list[Number] | None = Field(default=None, min_length=2, max_length=2)
    """Lowest and highest value, searched on a logarithmic scale. Two whole numbers give whole numbers."""
    range: list[Number] | None = Field(default=None, min_length=2, max_length=2)
    """Lowest and highest value, searched evenly. Two whole numbers give whole numbers."""
    step: Number | None = Field(default=None, gt=0)
    """The distance between two values of a range (null: any value, or every whole number)."""
    choice: list[Any] | None = Field(default=None, min_length=1)
    """The values themselves; lists and mappings may be among them."""
    when: dict[Text, Any] = Field(default_factory=dict)
    """The condition under which the field is searched: values of other fields of the space, such as `{training.optim:
    sgd}`; a list allows each of its values. Otherwise the recipe's own value holds."""


class Sweep(Section):
    """A search for the fields of a recipe that give the best model on the validation split."""

    space: dict[Text, Parameter] = Field(min_length=1)
    """The fields to search by dotted name, such as `{training.learning_rate: {log: [1.0e-5, 1.0e-4]}}`. Data and
    release are the same for all trials."""
    metric: Text | None = None
    """The metric on the validation split to optimize, one of evaluation.metrics or a figure of a metric of yours (null:
    metric_for_best_model if it is one of evaluation.metrics, else the first of these)."""
    direction: Literal["maximize", "minimize"] | None = None
    """Whether higher or lower values are better (null: as docs/reference/metrics.md lists the metric)."""
    trials: int | None = Field(default=None, ge=1, le=100_000)
    """The number of trials; trials that were stored count (null: 20, or the whole grid)."""
    sampler: NameOrSettings = "tpe"
    """Proposes settings: tpe, random, grid or cmaes of Optuna, or `{name: tpe, n_startup_trials: 5}`. grid needs
    choices, whole numbers or steps."""
    pruner: NameOrSettings = "none"
    """Stops trials early by their evaluations during training: none, asha, hyperband, median or percentile, or
    `{name: asha, min_resource: 1, reduction_factor: 3}`. A stopped trial keeps its checkpoint, and asha and hyperband
    resume it if it turns out to be among the best."""
    parallel: int = Field(default=1, ge=1, le=1000)
    """Trials that run at once: on this machine each with GPUs of its own, or on a cluster. With one at a time, the same
    seed gives the same trials."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which no trial starts and running ones are stopped with a checkpoint (null: no limit)."""
    max_failures: int = Field(default=3, ge=0)
    """Failed trials that the sweep tolerates; one more ends it."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed of the sampler."""

    @property
    def sampler_name(self) -> str:
        """The sampler's name."""
        return name_of(self.sampler)

    @property
    def pruner_name(self) -> str:
        """The pruner's name."""
        return name_of(self.pruner)


def name_of(value: NameOrSettings) -> str:
    """The name of a sampler or pruner."""
    return value if isinstance(value, str) else str(value.get("name"))
