"""The flow that fine-tunes anew when something changed since the last completed run, and else does nothing."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from flows.changes import cached_result, changes, nothing_changed
from flows.finetune import fine_tune, listeners
from flows.naming import flow_run_name
from flows.pipeline import pipeline
from flows.reports.result import result, verdict_event
from tasks.cache.history import History
from tasks.cache.planner import Planner
from tasks.cache.refs import Lock
from tasks.prefect import events
from tasks.stages.resolve import lock_file
from tasks.tracking.connection import MlflowFailed
from training.problems import NETWORK, Problem, UserError
from training.recipe import Recipe, parse


@flow(name="retrain", flow_run_name=flow_run_name)
def retrain(
    recipe: Recipe, overrides: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any] | State[Any]:
    """Fine-tunes, evaluates and registers a model where something changed since the last completed run.

    Args:
        recipe: All that makes the model.
        overrides: Fields of the recipe by dotted name, such as {"training.learning_rate": 3e-5}.
        reason: Why this run was started; shown in Prefect.
    """
    with events.alive(str(flow_run.get_id())):
        return _retrain(parse(recipe.model_dump(exclude_unset=True), overrides), reason)


def _retrain(recipe: Recipe, reason: str | None) -> dict[str, Any] | State[Any]:
    logger = get_run_logger()
    if reason:
        logger.info(f"Started because of {reason}")
    if lock_file(str(flow_run.get_id())).is_file():
        logger.info("This run is tried again: it goes on with what it was pinned to.")
        return fine_tune(recipe)
    planner = Planner(recipe.name)
    try:
        lock = pipeline(planner, recipe).lock
    except (UserError, MlflowFailed):  # the stages meet it again, and tell it as they tell every mistake
        return fine_tune(recipe)
    unreachable = _unreachable(recipe, lock)
    if unreachable and unreachable["runs"] > unreachable["max_unreachable"]:
        return _failed(recipe, unreachable)
    warnings = [_warning(unreachable)] if unreachable else []
    for warning in warnings:
        logger.warning(warning)
    done = nothing_changed(recipe.name, planner.rows)
    if done is None:
        why = changes(recipe.name, planner.rows)
        logger.info("\n  ".join(["What changed:", *why]))
        return fine_tune(recipe, why=why, warnings=warnings, more={"hub_unreachable": unreachable})
    done = cached_result(done) | {"hub_unreachable": unreachable}
    done["warnings"] = [*warnings, *done["warnings"]]
    for listener in listeners.get():
        listener.run_ended(done)
    if unreachable:
        return Completed(name="HubUnreachable", message=f"{warnings[0]} {_since(done)}", data=done)
    return Completed(name="Unchanged", message=_since(done), data=done)


def _unreachable(recipe: Recipe, lock: Lock) -> dict[str, Any] | None:
    """The repositories of the Hub that could not be looked up, and for how many runs in a row; None if there is none.
    Plain JSON, as the result has it."""
    history = History(recipe.name)
    if not lock.unreachable:
        history.forget_unreachable()
        return None
    runs = history.count_unreachable(str(flow_run.get_id()))
    allowed = recipe.release.retrain.max_unreachable
    return {"repositories": lock.unreachable, "runs": runs, "max_unreachable": allowed}


def _warning(unreachable: dict[str, Any]) -> str:
    named, counted = ", ".join(unreachable["repositories"]), f"run {unreachable['runs']} in a row without an answer"
    return f"The Hub did not say whether {named} changed ({counted}; {unreachable['max_unreachable']} are allowed)."


def _failed(recipe: Recipe, unreachable: dict[str, Any]) -> State[Any]:
    """Ends the run without doing anything, and reports it as every failed run is reported."""
    message = (
        f"{_warning(unreachable)} Check the network and HF_HUB_OFFLINE, then run it again; or pin the revision to a "
        "commit, or raise the field."
    )
    error = UserError([Problem(kind=NETWORK, where="release.retrain.max_unreachable", message=message)])
    done = result("failed", [], flow_run_id=str(flow_run.get_id()), error=error) | {"hub_unreachable": unreachable}
    for listener in listeners.get():
        listener.run_ended(done)
    events.verdict(recipe.name, verdict_event(recipe, done, None))
    return Failed(message=str(error))


def _since(done: dict[str, Any]) -> str:
    """`Nothing changed since flow run 0a1b…, which registered sst2/3.`"""
    registered = done["model"]["registered"]
    version = f", which made {registered.replace('/', ' version ')}" if registered else ""
    return f"Nothing changed since flow run {done['flow_run_id']}{version}."
