"""The flow `retrain`: fine-tunes again only if something changed since the last completed run."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from flows.callers import WORKER, Caller
from flows.finetune import fine_tune
from flows.naming import flow_run_name
from flows.pipeline import pipeline
from flows.plan import build_cached_result, find_unchanged_run, launch_training_early, list_changes
from flows.reports.result import build_result, build_verdict_event
from tasks.cache.history import History
from tasks.cache.planner import Planner
from tasks.cache.results import Lock
from tasks.jobs.engines.local import early_launches
from tasks.prefect import events
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.resolve import lock_file
from tasks.tracking.connection import MlflowFailed
from training.problems import NETWORK, UserError
from training.recipe import Recipe, parse


@flow(name="retrain", flow_run_name=flow_run_name)
def retrain(
    recipe: Recipe, overrides: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any] | State[Any]:
    """Fine-tunes, evaluates and registers a model if something changed since the last completed run.

    Args:
        recipe: All that makes the model.
        overrides: Fields of the recipe by dotted name, such as {"training.learning_rate": 3e-5}.
        reason: Why this run was started; shown in Prefect.
    """
    return run_retrain(WORKER, recipe, overrides, reason)


def run_retrain(
    caller: Caller, recipe: Recipe, overrides: dict[str, Any] | None, reason: str | None
) -> dict[str, Any] | State[Any]:
    """Runs the flow `retrain` for a caller."""
    with events.emit_heartbeats(str(flow_run.get_id())), early_launches():
        return _retrain(caller, parse(recipe.model_dump(exclude_unset=True), overrides), reason)


def _retrain(caller: Caller, recipe: Recipe, reason: str | None) -> dict[str, Any] | State[Any]:
    logger = get_run_logger()
    if reason:
        logger.info(f"Started because of {reason}")
    if lock_file(str(flow_run.get_id())).is_file():
        logger.info("This run is a retry and continues with the versions that it pinned at first.")
        return fine_tune(caller, recipe)
    planner = Planner(recipe.name, remote=open_remote())
    try:
        lock = pipeline(planner, recipe).lock
    except (UserError, MlflowFailed):  # the stages meet the same error, and report it like every error
        return fine_tune(caller, recipe)
    unreachable = _count_unreachable(recipe, lock)
    if unreachable and unreachable["runs"] > unreachable["max_unreachable"]:
        return _fail(caller, recipe, unreachable)
    warnings = [_format_unreachable(unreachable)] if unreachable else []
    for warning in warnings:
        logger.warning(warning)
    extra = {"hub_unreachable": unreachable, "warnings": warnings}
    last = find_unchanged_run(recipe.name, planner.rows)
    if last is None:
        changes = list_changes(recipe.name, planner.rows)
        logger.info("\n  ".join(["What changed:", *changes]))
        launch_training_early(recipe, planner, lock)
        return fine_tune(caller, recipe, changes=changes, extra=extra)
    result = build_cached_result(recipe, last)
    result |= extra | {"warnings": [*warnings, *result["warnings"]]}
    caller.send(result)
    registered = result["model"]["registered"]
    version = f", which made {registered.replace('/', ' version ')}" if registered else ""
    message = f"Nothing changed since flow run {result['flow_run_id']}{version}."
    if unreachable:
        return Completed(name="HubUnreachable", message=f"{warnings[0]} {message}", data=result)
    return Completed(name="Unchanged", message=message, data=result)


def _count_unreachable(recipe: Recipe, lock: Lock) -> dict[str, Any] | None:
    """Counts the runs in a row in which the Hub did not answer; None if it answered. Plain JSON, part of the result."""
    history = History(recipe.name)
    if not lock.unreachable:
        history.forget_unreachable()
        return None
    runs = history.count_unreachable(str(flow_run.get_id()))
    allowed = recipe.release.retrain.max_unreachable
    return {"repositories": lock.unreachable, "runs": runs, "max_unreachable": allowed}


def _format_unreachable(unreachable: dict[str, Any]) -> str:
    count = f"run {unreachable['runs']} in a row without an answer; {unreachable['max_unreachable']} are allowed"
    return f"The Hub did not answer whether {', '.join(unreachable['repositories'])} changed ({count})."


def _fail(caller: Caller, recipe: Recipe, unreachable: dict[str, Any]) -> State[Any]:
    """Ends the run before its stages, with the result and the event of a failed run."""
    message = (
        f"{_format_unreachable(unreachable)} Check the network and HF_HUB_OFFLINE, then run it again; or pin the "
        "revision to a commit, or raise the field."
    )
    error = UserError.of(NETWORK, "release.retrain.max_unreachable", message)
    result = build_result("failed", [], flow_run_id=str(flow_run.get_id()), error=error)
    result["hub_unreachable"] = unreachable
    caller.send(result)
    events.emit_verdict(recipe.name, build_verdict_event(recipe, result, None))
    return Failed(message=str(error))
