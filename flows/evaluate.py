"""The flow `evaluate`: the figures of a registered version on rows whose labels arrived after its release."""

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
from tasks.cache.refs import Ref
from tasks.jobs.launch import JobFailed
from tasks.prefect import events
from tasks.prefect.progress import PrefectProgress
from tasks.registry.evaluations import Evaluation
from tasks.registry.monitored import (
    LABELLED,
    Monitored,
    find_monitored,
    find_rows,
    pin_inputs,
    read_recipe,
    require_no_reference,
)
from tasks.shared_store.opening import open_remote
from tasks.stages.evaluate import evaluate as score_labelled
from tasks.stages.evaluate import load_labelled, predict_labelled, record_evaluation
from tasks.tracking.connection import MlflowFailed
from tasks.tracking.evaluation_reports import summarize_evaluation
from training.problems import UserError


def evaluate_run_name() -> str:
    """Prefect calls this at the start of a run."""
    return f"evaluation of {flow_run.get_parameters().get('model', '?')}"


@flow(name="evaluate", flow_run_name=evaluate_run_name)
def evaluate(model: str, inputs: list[str], task: str = "") -> dict[str, Any] | State[Any]:
    """Evaluates a registered version on rows with labels, next to the figures of its registration.

    If a figure is outside of the gate's bounds, the event `finetune.evaluated` may start a deployment that retrains.

    Args:
        model: NAME, NAME@ALIAS or NAME/VERSION; a NAME alone is its champion.
        inputs: Files, folders and globs with the rows and their labels, in columns as the recipe names them.
        task: The class of the model's task type if it is your own; its code is run.
    """
    run, remote = str(flow_run.get_id()), open_remote()
    with events.emit_heartbeats(run), in_use():
        progress, followers = PrefectProgress(), listeners.get()
        remote.deliver_earlier()
        executor: Executor | None = None
        error: Exception | None = None
        found: tuple[Ref, Evaluation] | None = None
        version: Monitored | None = None
        try:
            version = find_monitored(model, task)
            require_no_reference(version)
            executor = Executor(version.recipe, run, (progress, *followers), remote=remote)
            found = run_stages(executor, version, inputs)
        except (UserError, MlflowFailed, JobFailed) as caught:
            error = caught
        warnings = executor.end_uploads(wait=True) if executor else []
        progress.end()
        state = "failed" if error else "completed"
        result = build_result(state, executor.rows if executor else [], flow_run_id=run, error=error, where="evaluate")
        result |= {"version": str(version.champion) if version else None, "evaluation": None, "warnings": warnings}
        if version and found:
            result["evaluation"] = build_evaluation(version, *found)
        for follower in followers:
            follower.run_ended(result)
        if version is None or found is None:
            return Failed(message=str(error))
        get_run_logger().info(summarize_evaluation(result["evaluation"]))
        if found[1].below:
            payload = {name: value for name, value in result["evaluation"].items() if name != "slices"}
            payload |= {"summary": summarize_evaluation(payload), "flow_run_id": run, "inputs": inputs}
            events.emit_evaluated(version.champion.name, payload)
        return result


def run_stages(executor: Executor, version: Monitored, inputs: Sequence[str]) -> tuple[Ref, Evaluation]:
    """Runs all stages of an evaluation. Returns its artifact, and its entry in the version's history."""
    recipe, rows, files = read_recipe(version), find_rows(version), pin_inputs(inputs, LABELLED)
    labelled: Ref = executor(load_labelled, version, recipe, rows, files)
    predicted: Ref = executor(predict_labelled, version, recipe, labelled)
    evaluated: Ref = executor(score_labelled, version, recipe, labelled, predicted)
    entry: Evaluation = executor(record_evaluation, version, recipe, labelled, evaluated, [pin.path for pin in files])
    return evaluated, entry


def build_evaluation(version: Monitored, evaluated: Ref, entry: Evaluation) -> dict[str, Any]:
    """Builds the evaluation as JSON values."""
    report = json.loads((evaluated.path / "evaluation.json").read_text(encoding="utf-8"))
    return {
        "version": str(version.champion),
        "recipe": version.recipe,
        "number": entry.number,
        "below": entry.below,
        "split": version.split,
        "promised": version.promised,
        **report,
        "mlflow_run_id": version.mlflow_run,
    }
