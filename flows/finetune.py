"""The flow `finetune`: from a recipe to a model that is trained, judged and registered."""

import contextlib
import contextvars
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Any, NamedTuple

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.naming import flow_run_name
from flows.pipeline import Finished, pipeline
from flows.plan import launch_training_early
from flows.reports.result import build_result, build_verdict_event
from flows.reports.tracked_run import end_tracking, record_lineage, start_tracking
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.history import History
from tasks.cache.planner import Planner
from tasks.cache.results import Selection
from tasks.cache.stage import Listener
from tasks.home import home, tracking_is_local
from tasks.jobs.engines.local import early_launches
from tasks.jobs.launch import JobFailed
from tasks.prefect import events, flow_runs
from tasks.prefect.artifacts import PrefectProgress
from tasks.registry import untrusted_code
from tasks.reports.stage_summaries import STAGES_WITH_REPORT
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.resolve import lock_file
from tasks.tracking.connection import MlflowFailed
from training.problems import UserError, full_disk
from training.recipe import Recipe, parse

# Further listeners of a flow that is called in this process: the terminal of `finetune run`.
listeners: contextvars.ContextVar[tuple[Listener, ...]] = contextvars.ContextVar("listeners", default=())


in_command: contextvars.ContextVar[bool] = contextvars.ContextVar("in_command", default=False)
"""Whether a command calls the flow in its own process, for a person who waits; a worker's flows have none."""


class FromSweep(NamedTuple):
    """The sweep that a run releases a model for."""

    selection: Selection
    run: str
    """The sweep's flow run."""


from_sweep: contextvars.ContextVar[FromSweep | None] = contextvars.ContextVar("from_sweep", default=None)
"""Set while a sweep runs the flow with the settings that it has chosen."""

PREFECT_STATE = {"completed": StateType.COMPLETED, "failed": StateType.FAILED, "interrupted": StateType.CRASHED}


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
    with events.emit_heartbeats(str(flow_run.get_id())), early_launches():
        complete, forced = parse(recipe.model_dump(exclude_unset=True), overrides), frozenset(force or ())
        # `finetune run` has done it, and a sweep has trained. A retry would ask the Hub again for what the run has
        # pinned.
        launched = in_command.get() or from_sweep.get() is not None
        if not launched and not lock_file(str(flow_run.get_id())).is_file():
            _launch_training_early(complete, forced)
        return fine_tune(complete, forced)


def _launch_training_early(recipe: Recipe, force: frozenset[str]) -> None:
    with contextlib.suppress(UserError, MlflowFailed):  # the stages meet the same error, and report it
        planner = Planner(recipe.name, force, open_remote())
        launch_training_early(recipe, planner, pipeline(planner, recipe).lock)


def fine_tune(
    recipe: Recipe,
    force: frozenset[str] = frozenset(),
    changes: Sequence[str] = (),
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any] | State[Any]:
    """Runs all stages in the current flow run. Returns the run's result, or the state of a failed run.

    Args:
        recipe: All that makes the model.
        force: Stages to run although their output is stored.
        changes: The changes since the last completed run, if known.
        extra: Further fields of the result, plain JSON.
    """
    run, remote, sweep = str(flow_run.get_id()), open_remote(), from_sweep.get()
    tracking = start_tracking(recipe, run, changes, parent=sweep.run if sweep else None)
    with early_launches(), in_use(report_removal), closing(tracking) as tracker:
        followers = listeners.get()
        untrusted_code.record_code(run, recipe)
        progress = PrefectProgress(lambda: tracker.pages)
        remote.deliver_earlier()
        executor = Executor(recipe.name, run, (tracker, progress, *followers), force, remote)
        finished, error = _run_stages(executor, recipe, sweep.selection if sweep else None)
        if isinstance(error, UserError):
            tracker.log_text(
                "problems.json", json.dumps([problem.model_dump() for problem in error.problems], indent=1)
            )
            if executor.rows and executor.rows[-1].name in STAGES_WITH_REPORT:
                progress.refused(error.problems)
        state = "completed" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
        record_lineage(tracker, recipe, run, state, executor.rows, finished)
        warnings = executor.end_uploads(wait=state != "interrupted")
        # A command ends without a server that is down. On a worker, Prefect tries for minutes to reach it.
        server_down = in_command.get() and not flow_runs.server_answers()
        if not server_down:
            progress.end()
        result = build_result(state, executor.rows, flow_run_id=run, finished=finished, error=error) | dict(extra)
        end_tracking(tracker, recipe, run, result, finished, changes)
        warnings += [*tracker.warnings, *([] if error else _remember(recipe, result))]
        for warning in warnings:
            get_run_logger().warning(warning)
        if server_down:
            warnings.append(
                "The Prefect server does not answer and shows an old state of this run. "
                "The next run that executes a stage sends it the final state."
            )
        result["warnings"] = [*result["warnings"], *warnings]
        for follower in followers:
            follower.run_ended(result)
        if server_down:
            flow_runs.save_final_state(run, PREFECT_STATE[state])
            raise Abort("the Prefect server is down")  # the only end of a flow that sends the server nothing
        if state != "interrupted":
            champion = str(finished.champion) if finished and finished.champion else None
            events.emit_verdict(recipe.name, build_verdict_event(recipe, result, champion))
        return _end_flow(result, error)


def _run_stages(
    executor: Executor, recipe: Recipe, selection: Selection | None
) -> tuple[Finished | None, BaseException | None]:
    """Returns the results of the stages, or the error that ended them."""
    try:
        return pipeline(executor, recipe, selection), None
    except BaseException as error:  # the trackers receive the state of every run, also of an interrupted one
        if isinstance(error, MlflowFailed) and not tracking_is_local():
            return None, error  # the full disk may be that of the MLflow server
        return None, full_disk(home(), error) or error


def _remember(recipe: Recipe, result: dict[str, Any]) -> list[str]:
    """Remembers the completed run for the next plan; returns a warning if the disk refuses it."""
    try:
        History(recipe.name).remember_completed(result)
    except OSError as error:
        return [
            f"This run is complete, but could not be remembered in {home()} ({error.strerror}): "
            "the same command may execute its stages again."
        ]
    return []


def _end_flow(result: dict[str, Any], error: BaseException | None) -> dict[str, Any] | State[Any]:
    """Returns the flow's state. Mistakes and failed jobs have no traceback of this process."""
    if error is None:
        return result
    if isinstance(error, JobFailed) and error.failure.traceback:
        get_run_logger().error(error.failure.traceback)
    if isinstance(error, UserError | JobFailed | MlflowFailed):
        return Failed(message=str(error))
    raise error


def report_removal() -> None:
    """Says why a run does not begin."""
    text = "This run waits until `finetune store --remove` has set folders of this home aside."
    get_run_logger().info(text)
    if in_command.get():  # a terminal does not show Prefect's log
        print(text, file=sys.stderr)
