"""The settings of this room's child programs in their job.json."""

from __future__ import annotations

from training.jobs.protocol import TaskSettings


class LogModelSettings(TaskSettings):
    """Of tasks.registry.log_model."""

    experiment: str
    """Of MLflow."""
    run_id: str
    """Of MLflow."""
    registry: str
    """The name of the registered model."""
    inputs: list[str]
    """The columns that the model reads."""
    labels: list[str]
    """Names, in the order of their indices."""
    max_length: int
    """Tokens a row."""
    tags: dict[str, str]
    """Of the version."""
    requirements: list[str]
    """For pip, where the model is served."""
    probes: int
    """Rows whose predictions are compared with the stored ones."""
    examples: int
    """Probes that are stored as the model's examples."""
    tolerance: float
    """Between two predicted numbers."""


class PredictRowsSettings(TaskSettings):
    """Of tasks.registry.predict_rows."""

    model: str
    """An MLflow model URI."""
    max_length: int
    """Tokens a row."""
    columns: dict[str, str]
    """The rows' names for the columns that the model reads, by the task type's."""
    rows: list[list[str]]
    """A value a column."""


class ExportVersionSettings(TaskSettings):
    """Of tasks.registry.exports."""

    model: str
    """An MLflow model URI."""
    export: str
    """A format, or `safetensors`."""
    run_id: str | None
    """The MLflow run that has the released export; None if there is none."""
