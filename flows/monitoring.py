"""Flows that look at a registered version: their frame, and the stages of a drift report with its event."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.reports.result import build_result
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.results import Artifact, NumberedComparison
from tasks.cache.stage import Listener
from tasks.jobs.launch import JobFailed
from tasks.prediction.drift_samples import Sample
from tasks.prefect import events
from tasks.prefect.artifacts import PrefectProgress
from tasks.registry.monitoring import Monitored, find_monitored, find_rows
from tasks.reports.model_reports import describe_drift, summarize_drift
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.drift import count_look, record_drift
from tasks.stages.drift import drift as compare_rows
from tasks.stages.profile import observe, profile
from tasks.tracking.connection import MlflowFailed
from tasks.tracking.outbox import running
from training.problems import UserError
from training.recipe import Drift


def run_for_version(
    report_name: str,
    model: str,
    task: str,
    data: Mapping[str, Any] | None,
    followers: Sequence[Listener],
    warnings: list[str],
    *,
    stages: Callable[[Executor, Monitored], dict[str, Any]],
    announce: Callable[[Monitored, dict[str, Any]], None],
) -> dict[str, Any] | State[Any]:
    """Runs stages on a registered version in the current flow run. Returns the run's result, or the state of a failed
    run.

    Args:
        report_name: The field of the result that has the report.
        model: NAME, NAME@ALIAS or NAME/VERSION; a NAME alone is its champion.
        task: The class of the model's task type if it is the user's own.
        data: Fields of the recipe's section data by which rows are read, in place of the recipe's values.
        followers: Listeners besides Prefect's progress.
        warnings: The warnings of the stages.
        stages: Runs the stages. Returns their report, JSON values.
        announce: Logs the report and emits its event.
    """
    run, remote, progress = str(flow_run.get_id()), open_remote(), PrefectProgress()
    with events.emit_heartbeats(run), in_use(), running(run):
        remote.deliver_earlier()
        executor: Executor | None = None
        error: Exception | None = None
        report: dict[str, Any] | None = None
        version: Monitored | None = None
        try:
            version = find_monitored(model, task, data)
            executor = Executor(version.recipe, run, (progress, *followers), remote=remote)
            report = stages(executor, version)
        except (UserError, MlflowFailed, JobFailed) as caught:
            error = caught
        rows = executor.rows if executor else []
        warnings += executor.end_uploads(wait=True) if executor else []
        progress.end()
        for warning in warnings:
            get_run_logger().warning(warning)
        result = build_result("failed" if error else "completed", rows, flow_run_id=run, error=error, where=report_name)
        result |= {"version": str(version.champion) if version else None, report_name: report, "warnings": warnings}
        for follower in followers:
            follower.run_ended(result)
        if version is None or report is None:
            return Failed(message=str(error))
        announce(version, report)
        return result


def run_drift_stages(
    executor: Executor, version: Monitored, section: Drift, sample: Sample, files: Sequence[str]
) -> dict[str, Any]:
    """Runs all stages of a drift report. Returns the report.

    Args:
        executor: Runs the stages.
        version: The version with the profile.
        section: The thresholds, `release.drift` of the recipe.
        sample: Of the new rows.
        files: Their paths or URLs, for the record.
    """
    reference: Artifact = executor(profile, version, section, find_rows(version))
    observed: Artifact = executor(observe, version, section, sample)
    look: NumberedComparison | None = executor(count_look, version, section, reference, observed)
    report: Artifact = executor(compare_rows, version, section, look, reference, observed)
    executor(record_drift, version, files, reference, report)
    return report.figures


def announce_drift(version: Monitored, report: dict[str, Any], inputs: Sequence[str]) -> None:
    """Logs the verdict, and emits the event `finetune.drift`."""
    get_run_logger().info(describe_drift(report))
    payload = {
        "verdict": report["verdict"],
        "summary": summarize_drift(report),
        "version": str(version.champion),
        "recipe": version.recipe,
        "look": report["look"],
        "rows": report["rows"],
        "differences": [line["name"] for line in report["comparisons"] if line["verdict"] != "steady"],
        "estimated_accuracy": json.loads(json.dumps(report["estimated_accuracy"])),
        "inputs": list(inputs),
        "mlflow_run_id": version.mlflow_run,
        "flow_run_id": str(flow_run.get_id()),
    }
    events.emit_drift(version.champion.name, payload)
