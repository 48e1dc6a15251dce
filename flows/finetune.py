"""The flow: from a recipe to a model that is trained, judged and registered."""

import contextvars
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Any

import yaml
from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.naming import flow_run_name
from flows.pipeline import Finished, pipeline
from flows.reports.note import note
from flows.reports.result import result, verdict_event
from tasks.cache import settings
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.history import History
from tasks.cache.stage import Listener
from tasks.jobs.launch import JobFailed
from tasks.jobs.machines import Leader, find_machines
from tasks.prefect import events, pending_states
from tasks.prefect.progress import PrefectProgress
from tasks.registry import consent, lineage
from tasks.tracking.connection import MlflowFailed
from tasks.tracking.mlflow_run import JUDGED_TAG, NOTE_TAG, Tracker
from tasks.tracking.stage_table import STAGES_WITH_REPORT
from training.problems import UserError, full_disk
from training.recipe import Recipe, parse

# Who else follows a flow that is called in this process: the terminal of `finetune run`.
listeners: contextvars.ContextVar[tuple[Listener, ...]] = contextvars.ContextVar("listeners", default=())

MLFLOW_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
PREFECT_STATE = {
    "completed": StateType.COMPLETED,
    "failed": StateType.FAILED,
    "interrupted": StateType.CRASHED,
}


@flow(name="finetune", flow_run_name=flow_run_name)
def finetune(
    recipe: Recipe, overrides: dict[str, Any] | None = None, force: list[str] | None = None
) -> dict[str, Any] | State[Any]:
    """Fine-tunes, evaluates and registers a model.

    Args:
        recipe: All that makes the model.
        overrides: Fields of the recipe by dotted name, such as {"training.learning_rate": 3e-5}.
        force: Stages to run although their output is stored.
    """
    with events.alive(str(flow_run.get_id())):
        recipe = parse(recipe.model_dump(exclude_unset=True), overrides)  # a file may say what the recipe does not
        return fine_tune(recipe, frozenset(force or ()))


def fine_tune(
    recipe: Recipe,
    force: frozenset[str] = frozenset(),
    why: Sequence[str] = (),
    warnings: Sequence[str] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any] | State[Any]:
    """All of it, in the flow run that this is called in: the run's result, or the state that tells why there is none.

    Args:
        recipe: All that makes the model.
        force: Stages to run although their output is stored.
        why: The changes since the last run, if known; part of the result.
        warnings: What the result shall warn of.
        more: Further fields of the result, plain JSON.
    """
    run = str(flow_run.get_id())
    with in_use(_tell_of_removal), closing(_begin_tracking(recipe, run, why)) as tracker:
        return _followed(recipe, run, tracker, force, why, warnings, more)


def _tell_of_removal() -> None:
    waiting = "`finetune store --remove` is at this home: this run waits until what goes is put aside."
    get_run_logger().info(waiting)
    if listeners.get():  # a terminal, where Prefect's own lines are not shown
        print(waiting, file=sys.stderr)


def _followed(
    recipe: Recipe,
    run: str,
    tracker: Tracker,
    force: frozenset[str],
    why: Sequence[str],
    warnings: Sequence[str],
    more: Mapping[str, Any],
) -> dict[str, Any] | State[Any]:
    machines = find_machines(recipe.compute)
    following: list[Listener] = [*listeners.get(), *([Leader(machines, run)] if machines.count > 1 else [])]
    consent.remember(run, recipe)
    progress = PrefectProgress(lambda: tracker.url)
    walk = Executor(recipe.name, run, (tracker, progress, *following), force)
    finished, error = None, None
    try:
        finished = pipeline(walk, recipe)
    except BaseException as caught:  # MLflow gets the state of the run, whatever ends it
        error = _told_as_full_disk(caught) or caught
    if isinstance(error, UserError):
        tracker.text("problems.json", json.dumps([problem.model_dump() for problem in error.problems], indent=1))
        if walk.rows and walk.rows[-1].name in STAGES_WITH_REPORT:
            progress.refused(error.problems)
    state = "completed" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
    _tell_lineage(tracker, recipe, walk, run, state, finished)
    # Where nobody watches, Prefect's own patience is right: minutes of tries to tell the server.
    away = bool(listeners.get()) and not pending_states.server_answers()
    if not away:
        progress.end()
    done = result(state, walk.rows, flow_run_id=run, finished=finished, error=error)
    tracker.tags({NOTE_TAG: note(recipe, run, why, finished, done["problems"])})
    tracker.end(MLFLOW_STATUS[state])
    done |= {**more, "mlflow_run_id": tracker.mlflow_run_id, "warnings": [*warnings, *_warnings(tracker, away)]}
    if why:
        done["why"] = list(why)
    if error is None:
        done["warnings"] += _remember_completed(recipe.name, done)
    for listener in following:
        listener.run_ended(done)
    if not away and state != "interrupted":
        champion = finished.champion if finished else None
        before = str(champion) if champion else None
        events.verdict(recipe.name, verdict_event(recipe, done, before))
    if away:
        pending_states.keep(run, PREFECT_STATE[state])
        raise Abort("the Prefect server is away")  # the one end of a flow that asks the server nothing
    return _flow_state(done, error)


def _begin_tracking(recipe: Recipe, run: str, why: Sequence[str]) -> Tracker:
    """The run at MLflow, called as it is called at Prefect, with what is known at its beginning."""
    tracker, values = Tracker(recipe.name, run, str(flow_run.get_name())), recipe.model_dump(mode="json")
    tracker.params(_flat(values))
    tracker.tags({JUDGED_TAG: f"{recipe.judged_split}/{recipe.compared_by}", NOTE_TAG: note(recipe, run, why)})
    tracker.text("recipe.yaml", yaml.safe_dump(values, sort_keys=False))
    if why:
        tracker.tags({"retrain.why": "; ".join(why)})
    return tracker


def _tell_lineage(
    tracker: Tracker, recipe: Recipe, walk: Executor, run: str, state: str, finished: Finished | None
) -> None:
    """Keeps where the model came from. What goes wrong with that fails no run: it is a warning in the log."""
    made: dict[str, Any] = {}
    if finished is not None:
        made = {name: getattr(finished, name) for name in ("verdict", "version", "publication", "promotion")}
    try:
        record = lineage.record(recipe, run, walk.rows, mlflow_run=tracker.mlflow_run_id, state=state, **made)
        tracker.text(lineage.LINEAGE, lineage.keep(record))
    except Exception:
        get_run_logger().warning("where the model came from is not kept", exc_info=True)


def _told_as_full_disk(error: BaseException) -> UserError | None:
    """The full disk of which the error came; None where it came of none, or of one on MLflow's own machine."""
    if isinstance(error, MlflowFailed) and not settings.tracking_is_local():
        return None
    return full_disk(settings.home(), error)


def _warnings(tracker: Tracker, away: bool) -> list[str]:
    """What the user should know although the run has ended as it has."""
    said = [*tracker.warnings]
    if tracker.lost:
        said.append(
            "MLflow will never have everything of this run, nor how it ended: "
            f"{tracker.folder} could not be written to, and what waited for that is lost."
        )
    elif tracker.trouble:
        said.append(f"MLflow has not everything yet ({tracker.trouble}); the next run delivers it.")
    for warning in said:
        get_run_logger().warning(warning)
    if away:
        said.append(
            "The Prefect server does not answer: it shows this run as it was when it was last reached. "
            "The next run that runs a stage tells it how this one ended."
        )
    return said


def _remember_completed(recipe: str, done: dict[str, Any]) -> list[str]:
    """Remembers it for the next run. What keeps it from that fails no run that is complete: it is a warning."""
    try:
        History(recipe).remember_completed(done)
    except OSError as error:
        warning = (
            f"This run is complete, but {settings.home()} could not be written to ({error.strerror}) to remember it: "
            "the same command may go through its stages again, where it would have found that nothing changed."
        )
        get_run_logger().warning(warning)
        return [warning]
    return []


def _flow_state(done: dict[str, Any], error: BaseException | None) -> dict[str, Any] | State[Any]:
    """The error as Prefect gets it: mistakes and failed jobs come without this process's traceback."""
    if error is None:
        return done
    if isinstance(error, JobFailed) and error.failure.traceback:
        get_run_logger().error(error.failure.traceback)
    if isinstance(error, UserError | JobFailed | MlflowFailed):
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
