"""Stages: the number of a look at new rows, their comparison with the version's profile, and its record in MLflow."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime

from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact, NumberedComparison
from tasks.cache.stage import Inputs, Work, action
from tasks.home import registry_place
from tasks.jobs.job import StageJob, stage, whole
from tasks.registry.comparisons import confidence_of_number, number_comparison
from tasks.registry.monitored_versions import MonitoredVersion
from tasks.registry.versions import DRIFT_TAG, PROFILE_TAG
from tasks.tracking.connection import connect, mlflow_errors
from training.data.file_systems import name_of
from training.programs.drift import DriftResult, DriftSettings, InputRows
from training.programs.observe import ObserveResult
from training.recipe.fields import Drift


def count_inputs(
    version: MonitoredVersion, section: Drift, profile: Artifact[ObserveResult], observed: Artifact[ObserveResult]
) -> Inputs:
    """The version's profile, and the new rows as the model sees them."""
    return Inputs(
        {
            "registry": registry_place(),
            "version": str(version.pinned),
            "confidence": section.confidence,
            "upstream": {"profile": profile.digest, "observe": observed.digest},
        }
    )


@action(count_inputs, gives=NumberedComparison)
def count_look(
    work: Work,
    version: MonitoredVersion,
    section: Drift,
    profile: Artifact[ObserveResult],
    observed: Artifact[ObserveResult],
) -> NumberedComparison | None:
    """Numbers the look among all at this version, and computes the confidence that it needs. The same rows are the same
    look. Skipped if there are too few rows to compare."""
    if min(profile.result.observed, observed.result.observed) < section.min_rows:
        work.state = "skipped"
        return None
    looks = digest_of({"drift": str(version.pinned), "model": version.pinned.model})
    number = number_comparison(version.pinned.name, looks, digest_of([profile.digest, observed.digest]))
    return NumberedComparison(comparison=number, confidence=confidence_of_number(number, section.confidence))


@stage(DriftResult)
def drift(
    version: MonitoredVersion,
    section: Drift,
    look: NumberedComparison | None,
    profile: Artifact[ObserveResult],
    observed: Artifact[ObserveResult],
) -> StageJob:
    """Compares new rows with the version's validation rows.

    Both observations, the thresholds and the confidence.
    """
    return StageJob(
        "training.programs.drift",
        DriftSettings(
            title=f"{version.pinned}, look {look.comparison}" if look else str(version.pinned),
            look=look.comparison if look else None,
            input=InputRows(rows=observed.result.rows, without_prediction=observed.result.without_prediction),
            alpha=1 - (look.confidence if look else section.confidence),
            **section.model_dump(include={"cohens_w", "distance", "auc", "min_rows"}),
        ),
        reads={"profile": whole(profile), "rows": whole(observed)},
        libraries=("numpy", "scipy", "scikit-learn", "matplotlib"),
    )


def record_inputs(
    version: MonitoredVersion, files: Sequence[str], profile: Artifact, report: Artifact[DriftResult]
) -> Inputs:
    """The version and the report."""
    return Inputs(
        {
            "registry": registry_place(),
            "version": str(version.pinned),
            "upstream": {"profile": profile.key, "drift": report.digest},
        }
    )


@action(record_inputs)
def record_drift(
    work: Work, version: MonitoredVersion, files: Sequence[str], profile: Artifact, report: Artifact[DriftResult]
) -> None:
    """Stores the report with the version: its page of pictures and its numbers, by look, in the MLflow run that
    registered the version, and its verdict as a tag of the version."""
    found, name, number = report.result, version.pinned.name, version.pinned.version
    now = datetime.now(UTC)
    summary = {
        "time": now.isoformat(timespec="seconds"),
        **found.model_dump(include={"verdict", "look", "rows", "estimated_accuracy"}),
        "files": [name_of(file) for file in files][:20],
        "differences": [line["name"] for line in found.comparisons if line["verdict"] != "steady"],
    }
    with mlflow_errors():
        from mlflow.entities import Metric

        client = connect()
        client.set_model_version_tag(name, number, PROFILE_TAG, profile.key)
        client.set_model_version_tag(name, number, DRIFT_TAG, json.dumps(summary, ensure_ascii=False))
        if version.mlflow_run is None or (look := found.look) is None:
            return
        folder = f"drift/look-{look:04d}"
        client.log_artifact(version.mlflow_run, str(report.path / "report.json"), folder)
        client.log_artifact(version.mlflow_run, str(report.path / "log" / "report.png"), folder)
        values = {line["name"]: line["value"] for line in found.comparisons}
        if accuracy := found.estimated_accuracy:
            values["estimated accuracy"] = accuracy["value"]
        stamp = int(now.timestamp() * 1000)
        metrics = [Metric(f"drift/{_metric_name(name)}", value, stamp, look) for name, value in values.items()]
        client.log_batch(version.mlflow_run, metrics=metrics)


def _metric_name(name: str) -> str:
    """A name that MLflow accepts: a task type of the user's may name its fields with any characters."""
    return re.sub(r"[^\w. :/-]", "_", name)
