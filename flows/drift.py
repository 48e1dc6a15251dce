"""The flow `drift`: compares new rows with the validation rows of a registered version."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.finetune import listeners
from flows.monitoring import announce_drift, run_drift_stages, run_for_version
from tasks.cache.executor import Executor
from tasks.prediction.drift_samples import draw_sample
from tasks.prediction.input_rows import list_files
from tasks.registry.monitoring import Monitored, read_drift_section, require_single_inputs


def drift_run_name() -> str:
    """Prefect calls this at the start of a run."""
    return f"drift of {flow_run.get_parameters().get('model', '?')}"


@flow(name="drift", flow_run_name=drift_run_name)
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
    warnings = list[str]()

    def compare(executor: Executor, version: Monitored) -> dict[str, Any]:
        require_single_inputs(version)
        section = read_drift_section(version, thresholds or {})
        files = list_files(inputs, field="inputs", rules=version.rules, remarks=warnings)
        sample, found = draw_sample(version, files, section.max_rows, executor.progress_of("observe", "files read"))
        warnings.extend(found)
        return run_drift_stages(executor, version, section, sample, [file.file for file in files])

    def announce(version: Monitored, report: dict[str, Any]) -> None:
        announce_drift(version, report, inputs)

    return run_for_version("drift", model, task, data, listeners.get(), warnings, stages=compare, announce=announce)
