"""The settings of the programs that observe and compare rows after the release, in their job.json.

They are apart from training.recipe.program_settings: that module counts for the keys of all stages of a fine-tune.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from training.jobs.protocol import Settings

FIELD = "field."
"""Prefix of the columns of predictions in the output of training.programs.observe."""


class ObserveSettings(Settings):
    """Of training.programs.observe."""

    task: str
    options: dict[str, Any] = Field(default_factory=dict)
    columns: dict[str, str]
    """The names of the model's input columns in files, by the task type's names."""
    max_length: int
    """Tokens a row."""
    max_rows: int
    """Rows that are observed; of more rows, so many are drawn at random."""
    labels: list[str] = Field(default_factory=list)
    """Names, in the order of the indices in the split."""
    batch_size: int
    """Rows in one forward pass."""
    micro_batch_divisor: int = 1
    """Divides the batch size, so that a batch fits into memory."""


class DriftSettings(Settings):
    """Of training.programs.drift."""

    title: str
    """The version and the rows, for the page of pictures."""
    alpha: float
    """The error level of the whole report."""
    min_rows: int
    """With fewer rows on either side, nothing is compared."""
    cohens_w: float
    """The smallest effect that matters, for categories."""
    distance: float
    """The same for numbers: the Kolmogorov-Smirnov distance."""
    auc: float
    """The same for words and embeddings: the held-out AUC."""


class EvaluateSettings(Settings):
    """Of training.programs.evaluate."""

    task: str
    options: dict[str, Any] = Field(default_factory=dict)
    labels: list[str]
    """Names, in the order of the indices in the evaluated rows."""
    metrics: list[str]
    slices: list[str]
    """Columns, `label` or `length_bucket`."""
    columns: list[str]
    """The model's input columns, by which rows are equal."""
    split: str
    """The split that was judged."""
    promised: dict[str, dict[str, float | None]]
    """The figures of the judged split, by name: value, low and high."""
    promised_labels: list[str] = Field(default_factory=list)
    """Names, in the order of the indices in the judged split."""
