"""The flow: from a recipe to a model that is trained, judged and registered."""

import contextvars
import json
from typing import Any

import yaml
from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.pipeline import pipeline
from flows.report import result
from tasks.runtime.history import History
from tasks.runtime.launch import JobFailed
from tasks.runtime.progress import PrefectProgress
from tasks.runtime.running import Running
from tasks.runtime.stage import Follower
from tasks.runtime.tracking import Tracker
from training.problems import UserError
from training.recipe import Recipe, parse

# Who else follows a flow that is called in this process: the terminal of `finetune run`.
followers: contextvars.ContextVar[tuple[Follower, ...]] = contextvars.ContextVar("followers", default=())

MLFLOW_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


@flow(name="finetune", flow_run_name="{recipe.name}")
def finetune(
    recipe: Recipe, overrides: dict[str, Any] | None = None, force: list[str] | None = None
) -> dict[str, Any] | State[Any]:
    """Fine-tunes, evaluates and registers a model.

    Args:
        recipe: All that makes the model.
        overrides: Fields of the recipe by dotted name, such as {"training.learning_rate": 3e-5}.
        force: Stages to run although their output is stored.
    """
    recipe = parse(recipe.model_dump(), overrides)
    run = str(flow_run.get_id())
    tracker, progress = Tracker(recipe.name, run), PrefectProgress()
    tracker.params(_flat(recipe.model_dump(mode="json")))
    tracker.text("recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    walk = Running(recipe.name, run, (tracker, progress, *followers.get()), frozenset(force or ()))
    finished, error = None, None
    try:
        finished = pipeline(walk, recipe)
    except BaseException as caught:  # whatever ends the run, MLflow is told
        error = caught
    state = "completed" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
    progress.end()
    tracker.end(MLFLOW_STATUS[state])
    done = result(
        state, walk.rows, flow_run_id=run, mlflow_run_id=tracker.mlflow_run_id, finished=finished, error=error
    )
    if tracker.trouble:
        get_run_logger().warning("MLflow has not everything yet (%s); the next run delivers it", tracker.trouble)
    for follower in followers.get():
        follower.run_ended(done)
    return _flow_state(recipe, done, error)


def _flow_state(recipe: Recipe, done: dict[str, Any], error: BaseException | None) -> dict[str, Any] | State[Any]:
    """What Prefect shall make of it: mistakes and failed jobs are told without this process's traceback."""
    if error is None:
        History(recipe.name).remember_completed(done)
        return done
    if isinstance(error, JobFailed) and error.failure.traceback:
        get_run_logger().error(error.failure.traceback)
    if isinstance(error, UserError | JobFailed):
        return Failed(message=str(error))
    raise error


def _flat(values: dict[str, Any], above: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{name}.")
        elif value is not None:
            flat[above + name] = value if isinstance(value, str) else json.dumps(value)
    return flat
