"""The flow `evaluate`: the metrics of a registered version on rows whose labels arrived after its release."""

from __future__ import annotations

import json
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.callers import WORKER, Caller, run_for_version
from tasks.cache.executor import Executor
from tasks.cache.input_files import pin_files
from tasks.cache.results import Artifact
from tasks.prediction.input_rows import list_files
from tasks.prefect import events
from tasks.registry.monitored_versions import (
    LaterEvaluation,
    MonitoredVersion,
    find_rows,
    read_recipe,
    require_no_reference,
)
from tasks.reports.model_reports import summarize_evaluation
from tasks.stages.evaluate import evaluate as score_labelled
from tasks.stages.evaluate import predict_labelled, record_evaluation
from tasks.stages.load_labelled import LabelledFiles, load_labelled


@flow(name="evaluate", flow_run_name="evaluation of {model}")
def evaluate(
    model: str, inputs: list[str], task: str = "", run_code: bool = False, data: dict[str, Any] | None = None
) -> dict[str, Any] | State[Any]:
    """Evaluates a registered version on rows with labels, next to its metrics at registration.

    If a metric is outside of the gate's bounds, the event `finetune.evaluated` may start a deployment that retrains.

    Args:
        model: NAME, NAME@ALIAS or NAME/VERSION; a NAME alone is its champion.
        inputs: Files, folders, globs and URLs of the rows and their labels, in columns as the recipe names them.
        task: The class of the model's task type if it is your own; its code is run.
        run_code: Whether to run other code that the recipe names, such as metrics, if another home registered it.
        data: Fields of the recipe's section data by which these rows are read, such as {"delimiter": ";"}.
    """
    return run_evaluation(WORKER, model, inputs, task, run_code, data)


def run_evaluation(
    caller: Caller, model: str, inputs: list[str], task: str, run_code: bool, data: dict[str, Any] | None
) -> dict[str, Any] | State[Any]:
    """Runs the flow `evaluate` for a caller."""
    warnings = list[str]()

    def score(executor: Executor, version: MonitoredVersion) -> dict[str, Any]:
        require_no_reference(version)
        recipe, rows = read_recipe(version, run_code), find_rows(version)
        files = pin_files(list_files(inputs, field="inputs", rules=version.rules, remarks=warnings))
        given = LabelledFiles(files, version.rules, "inputs", version=version.pinned)
        labelled: Artifact = executor(load_labelled, recipe, rows, given)
        predicted: Artifact = executor(predict_labelled, version, recipe, labelled)
        scored: Artifact = executor(score_labelled, version, recipe, labelled, predicted)
        names = [pin.path for pin in files]
        entry: LaterEvaluation = executor(record_evaluation, version, recipe, labelled, scored, names)
        return build_evaluation(version, scored, entry)

    def announce(version: MonitoredVersion, evaluation: dict[str, Any]) -> None:
        summary = summarize_evaluation(evaluation)
        get_run_logger().info(summary)
        if evaluation["below"]:
            payload = {name: value for name, value in evaluation.items() if name != "slices"}
            payload |= {"summary": summary, "flow_run_id": str(flow_run.get_id()), "inputs": inputs}
            events.emit_evaluated(version.pinned.name, payload)

    return run_for_version(caller, "evaluation", model, task, data, warnings, stages=score, announce=announce)


def build_evaluation(version: MonitoredVersion, scored: Artifact, entry: LaterEvaluation) -> dict[str, Any]:
    """Builds the evaluation as JSON values."""
    report = json.loads((scored.path / "evaluation.json").read_text(encoding="utf-8"))
    return {
        "version": str(version.pinned),
        "recipe": version.recipe,
        "number": entry.number,
        "below": entry.below,
        "split": version.split,
        "expected": version.expected,
        **report,
        "mlflow_run_id": version.mlflow_run,
    }
