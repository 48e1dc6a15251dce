"""The flow `drift`: compares new rows with the validation rows of a registered version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.finetune import listeners
from flows.reports.result import build_result
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.refs import NumberedComparison, Ref
from tasks.jobs.launch import JobFailed
from tasks.prefect import events
from tasks.prefect.progress import PrefectProgress
from tasks.registry.monitored import (
    Monitored,
    find_monitored,
    find_rows,
    pin_inputs,
    read_drift_section,
    require_single_inputs,
)
from tasks.shared_store.opening import open_remote
from tasks.stages.drift import count_look, record_drift
from tasks.stages.drift import drift as compare_rows
from tasks.stages.profile import observe, profile
from tasks.tracking.connection import MlflowFailed
from tasks.tracking.drift_reports import describe_drift, summarize_drift
from training.problems import UserError


def drift_run_name() -> str:
    """Prefect calls this at the start of a run."""
    return f"drift of {flow_run.get_parameters().get('model', '?')}"


@flow(name="drift", flow_run_name=drift_run_name)
def drift(
    model: str, inputs: list[str], thresholds: dict[str, int | float] | None = None, task: str = ""
) -> dict[str, Any] | State[Any]:
    """Compares new rows with the validation rows of a registered version, and reports the verdict.

    The verdict never promotes, rolls back or retrains: the event `finetune.drift` may start a deployment that does.

    Args:
        model: NAME, NAME@ALIAS or NAME/VERSION; a NAME alone is its champion.
        inputs: Files, folders and globs with the new rows.
        thresholds: Fields of the recipe's section release.drift, such as {"auc": 0.6}.
        task: The class of the model's task type if it is your own; its code is run.
    """
    run, remote = str(flow_run.get_id()), open_remote()
    with events.emit_heartbeats(run), in_use():
        progress, followers = PrefectProgress(), listeners.get()
        remote.deliver_earlier()
        executor: Executor | None = None
        error: Exception | None = None
        report: dict[str, Any] | None = None
        version: Monitored | None = None
        try:
            version = find_monitored(model, task)
            require_single_inputs(version)
            executor = Executor(version.recipe, run, (progress, *followers), remote=remote)
            report = run_stages(executor, version, inputs, thresholds or {}).figures
        except (UserError, MlflowFailed, JobFailed) as caught:
            error = caught
        rows = executor.rows if executor else []
        warnings = executor.end_uploads(wait=True) if executor else []
        progress.end()
        state = "failed" if error else "completed"
        result = build_result(state, rows, flow_run_id=run, error=error, where="drift")
        result |= {"version": str(version.champion) if version else None, "drift": report}
        result["warnings"] = warnings
        for follower in followers:
            follower.run_ended(result)
        if version is None or report is None:
            return Failed(message=str(error))
        get_run_logger().info(describe_drift(report))
        events.emit_drift(version.champion.name, build_drift_event(version, report, run, inputs))
        return result


def run_stages(
    executor: Executor, version: Monitored, inputs: Sequence[str], thresholds: dict[str, int | float]
) -> Ref:
    """Runs all stages of a report. Returns its artifact."""
    section, files = read_drift_section(version, thresholds), pin_inputs(inputs)
    reference: Ref = executor(profile, version, section, find_rows(version))
    observed: Ref = executor(observe, version, section, files)
    look: NumberedComparison | None = executor(count_look, version, section, reference, observed)
    report: Ref = executor(compare_rows, version, section, look, reference, observed)
    executor(record_drift, version, files, reference, report)
    return report


def build_drift_event(version: Monitored, report: dict[str, Any], run: str, inputs: Sequence[str]) -> dict[str, Any]:
    """Builds the payload of the event `finetune.drift`."""
    return {
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
        "flow_run_id": run,
    }
