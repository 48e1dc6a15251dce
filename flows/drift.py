"""The flow `drift`: compares new rows with the validation rows of a registered version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.callers import WORKER, Caller, run_for_version
from tasks.cache.executor import Executor
from tasks.prediction.drift_samples import Sample, draw_sample
from tasks.prediction.input_rows import list_files
from tasks.prefect import events
from tasks.registry.monitored_versions import MonitoredVersion, find_rows, read_drift_section, require_single_inputs
from tasks.reports.model_reports import describe_drift, summarize_drift
from tasks.stages.drift import count_look, record_drift
from tasks.stages.drift import drift as compare_rows
from tasks.stages.profile import observe, profile
from training.recipe import Drift


@flow(name="drift", flow_run_name="drift of {model}")
def drift(
    model: str,
    inputs: list[str],
    thresholds: dict[str, int | float] | None = None,
    task: str = "",
    data: dict[str, Any] | None = None,
) -> dict[str, Any] | State[Any]:
    """Compares new rows with the validation rows of a registered version, and reports the verdict.

    The verdict never promotes, rolls back or retrains: the event `finetune.drift` may start a deployment that does.

    Args:
        model: NAME, NAME@ALIAS or NAME/VERSION; a NAME alone is its champion.
        inputs: Files, folders, globs and URLs of the new rows.
        thresholds: Fields of the recipe's section release.drift, such as {"auc": 0.6}.
        task: The class of the model's task type if it is your own; its code is run.
        data: Fields of the recipe's section data by which these rows are read, such as {"delimiter": ";"}.
    """
    return run_drift(WORKER, model, inputs, thresholds, task, data)


def run_drift(
    caller: Caller,
    model: str,
    inputs: list[str],
    thresholds: dict[str, int | float] | None,
    task: str,
    data: dict[str, Any] | None,
) -> dict[str, Any] | State[Any]:
    """Runs the flow `drift` for a caller."""
    warnings = list[str]()

    def compare(executor: Executor, version: MonitoredVersion) -> dict[str, Any]:
        require_single_inputs(version)
        section = read_drift_section(version, thresholds or {})
        files = list_files(inputs, field="inputs", rules=version.rules, remarks=warnings)
        sample, found = draw_sample(version, files, section.max_rows, executor.progress_of("observe", "files read"))
        warnings.extend(found)
        return run_drift_stages(executor, version, section, sample, [file.file for file in files])

    def announce(version: MonitoredVersion, report: dict[str, Any]) -> None:
        announce_drift(version, report, inputs)

    return run_for_version(caller, "drift", model, task, data, warnings, stages=compare, announce=announce)


def run_drift_stages(
    executor: Executor, version: MonitoredVersion, section: Drift, sample: Sample, files: Sequence[str]
) -> dict[str, Any]:
    """Runs all stages of a drift report. Returns the report.

    Args:
        executor: Runs the stages.
        version: The version with the profile.
        section: The thresholds, `release.drift` of the recipe.
        sample: Of the new rows.
        files: Their paths or URLs, for the record.
    """
    reference = executor(profile, version, section, find_rows(version))
    observed = executor(observe, version, section, sample)
    look = executor(count_look, version, section, reference, observed)
    report = executor(compare_rows, version, section, look, reference, observed)
    executor(record_drift, version, files, reference, report)
    return report.result.model_dump(mode="json")


def announce_drift(version: MonitoredVersion, report: dict[str, Any], inputs: Sequence[str]) -> None:
    """Logs the verdict, and emits the event `finetune.drift`."""
    get_run_logger().info(describe_drift(report))
    payload = {
        "verdict": report["verdict"],
        "summary": summarize_drift(report),
        "version": str(version.pinned),
        "recipe": version.recipe,
        "look": report["look"],
        "rows": report["rows"],
        "differences": [line["name"] for line in report["comparisons"] if line["verdict"] != "steady"],
        "estimated_accuracy": report["estimated_accuracy"],
        "inputs": list(inputs),
        "mlflow_run_id": version.mlflow_run,
        "flow_run_id": str(flow_run.get_id()),
    }
    events.emit_drift(version.pinned.name, payload)
