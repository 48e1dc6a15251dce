"""The flow that fine-tunes anew when something changed since the last completed run, and else does nothing."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.changes import cached_result, changes, nothing_changed
from flows.finetune import fine_tune, followers
from flows.naming import flow_run_name
from flows.pipeline import pipeline
from tasks.resolve import pins_file
from tasks.runtime import events
from tasks.runtime.connection import MlflowFailed
from tasks.runtime.looking import Looking
from training.problems import UserError
from training.recipe import Recipe, parse


@flow(name="retrain", flow_run_name=flow_run_name)
def retrain(
    recipe: Recipe, overrides: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any] | State[Any]:
    """Fine-tunes, evaluates and registers a model where something changed since the last completed run.

    Args:
        recipe: All that makes the model.
        overrides: Fields of the recipe by dotted name, such as {"training.learning_rate": 3e-5}.
        reason: Why this run was started, for whoever reads it.
    """
    with events.alive(str(flow_run.get_id())):
        return _retrain(parse(recipe.model_dump(exclude_unset=True), overrides), reason)


def _retrain(recipe: Recipe, reason: str | None) -> dict[str, Any] | State[Any]:
    logger = get_run_logger()
    if reason:
        logger.info(f"Started because of {reason}")
    if pins_file(str(flow_run.get_id())).is_file():
        logger.info("This run is tried again: it goes on with what it was pinned to.")
        return fine_tune(recipe)
    looking = Looking(recipe.name)
    try:
        pipeline(looking, recipe)
    except (UserError, MlflowFailed):  # the stages meet it again, and tell it as they tell every mistake
        return fine_tune(recipe)
    done = nothing_changed(recipe.name, looking.rows)
    if done is None:
        why = changes(recipe.name, looking.rows)
        logger.info("\n  ".join(["What changed:", *why]))
        return fine_tune(recipe, why=why)
    done = cached_result(done)
    for follower in followers.get():
        follower.run_ended(done)
    return Completed(name="Unchanged", message=_since(done), data=done)


def _since(done: dict[str, Any]) -> str:
    """`Nothing changed since flow run 0a1b…, which registered sst2/3.`"""
    registered = done["model"]["registered"]
    version = f", which made {registered.replace('/', ' version ')}" if registered else ""
    return f"Nothing changed since flow run {done['flow_run_id']}{version}."
