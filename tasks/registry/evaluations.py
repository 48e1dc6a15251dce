"""The history of a version's figures on rows whose labels arrived after its release.

It is a tag of the version, its figures by number are metrics of the MLflow run that registered it, and its reports are
files of that run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.home import named_lock
from tasks.registry.monitored import Monitored
from tasks.registry.versions import EVALUATIONS_TAG, read_tag
from tasks.tracking.connection import connect, mlflow_errors

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

MAX_ENTRIES = 100
"""Of the tag; MLflow keeps the metrics of all."""
MAX_NAMES = 10


class LaterEvaluation(BaseModel):
    """The figures of a version on some rows."""

    model_config = ConfigDict(frozen=True)

    number: int
    """From 1. Rows that were evaluated before keep their number."""
    time: str
    """In UTC, such as 2026-01-31T12:00:00+00:00."""
    rows: int
    digest: str
    """Of the rows."""
    files: list[str]
    """Names, the first ones."""
    metrics: dict[str, dict[str, float | None]]
    """By name: value, low and high."""
    below: list[str]
    """Figures outside of the gate's bounds, such as `accuracy 0.71 < 0.75`."""


def read_evaluations(version: ModelVersion) -> list[LaterEvaluation]:
    """Reads the history from the version's tag, oldest first; entries that cannot be read are left out. Raises
    UserError as `read_tag` does."""
    found = []
    for entry in read_tag(version, EVALUATIONS_TAG, list[Any], "[]"):
        try:
            found.append(LaterEvaluation.model_validate(entry))
        except ValidationError:  # of a later version of the project
            continue
    return found


def find_missed_bounds(
    metrics: Mapping[str, Mapping[str, float | None]], minimum: Mapping[str, float], maximum: Mapping[str, float]
) -> list[str]:
    """The figures outside of the gate's bounds. An undefined figure keeps none."""
    missed = []
    for bounds, sign, factor in ((minimum, "<", 1), (maximum, ">", -1)):
        for name, bound in bounds.items():
            value = metrics.get(name, {}).get("value")
            if name in metrics and (value is None or factor * value < factor * bound):
                missed.append(f"{name} {'undefined' if value is None else f'{value:.4g}'} {sign} {bound:g}")
    return missed


def record(
    version: Monitored,
    *,
    rows: int,
    digest: str,
    metrics: Mapping[str, Mapping[str, float | None]],
    bounds: tuple[Mapping[str, float], Mapping[str, float]],
    names: Sequence[str],
    files: Sequence[Path],
) -> LaterEvaluation:
    """Adds an evaluation to the history, or replaces the one of the same rows. Raises MlflowFailed.

    Args:
        version: The version.
        rows: The number of rows.
        digest: Of the rows.
        metrics: By name: value, low and high.
        bounds: The gate's minimum and maximum.
        names: Of the files with the rows.
        files: The report, for MLflow.
    """
    name, number, now = version.champion.name, version.champion.version, datetime.now(UTC)
    with mlflow_errors(), named_lock(f"registry-{name}"):
        from mlflow.entities import Metric

        client = connect()
        history = read_evaluations(client.get_model_version(name, number))
        known = next((entry.number for entry in history if entry.digest == digest), None)
        found = LaterEvaluation(
            number=known or max((entry.number for entry in history), default=0) + 1,
            time=now.isoformat(timespec="seconds"),
            rows=rows,
            digest=digest,
            files=list(names)[:MAX_NAMES],
            metrics={metric: dict(score) for metric, score in metrics.items()},
            below=find_missed_bounds(metrics, *bounds),
        )
        kept = [*(entry for entry in history if entry.number != found.number), found]
        text = json.dumps([entry.model_dump(mode="json") for entry in kept[-MAX_ENTRIES:]], ensure_ascii=False)
        client.set_model_version_tag(name, number, EVALUATIONS_TAG, text)
        if version.mlflow_run is not None:
            for file in files:
                client.log_artifact(version.mlflow_run, str(file), f"evaluated/{found.number:04d}")
            stamp = int(now.timestamp() * 1000)
            values = {metric: score["value"] for metric, score in metrics.items() if score["value"] is not None}
            entries = [Metric(f"evaluated/{key}", value, stamp, found.number) for key, value in values.items()]
            client.log_batch(version.mlflow_run, metrics=entries)
    return found
