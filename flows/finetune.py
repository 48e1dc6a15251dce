"""The flow `finetune`: from a recipe to a model that is trained, judged and registered."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Any, NamedTuple

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort
from prefect.runtime import flow_run

from flows.callers import WORKER, Caller, fail
from flows.naming import flow_run_name
from flows.pipeline import Finished, pipeline
from flows.plan import launch_training_early
from flows.reports.result import build_result, build_verdict_event, state_of
from flows.reports.tracked_run import end_tracking, record_lineage, start_tracking
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.history import History
from tasks.cache.planner import Planner
from tasks.cache.results import Lock, Selection
from tasks.home import home, tracking_is_local
from tasks.jobs.engines.local import early_launches
from tasks.prefect import events, flow_runs
from tasks.prefect.prefect_artifacts import PrefectProgress
from tasks.registry import untrusted_code
from tasks.reports.stage_summaries import STAGES_WITH_REPORT
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.resolve import lock_file
from tasks.tracking.connection import MlflowFailed
from training.problems import UserError, full_disk
from training.recipe import Recipe, parse


class FromSweep(NamedTuple):
    """The sweep that a run releases a model for."""

    selection: Selection
    run: str
    """The sweep's flow run."""


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
    return run_finetune(WORKER, recipe, overrides, force, launches_early=True)


def run_finetune(
    caller: Caller,
    recipe: Recipe,
    overrides: dict[str, Any] | None,
    force: list[str] | None,
    *,
    launches_early: bool = False,
    sweep: FromSweep | None = None,
    recorded: Lock | None = None,
) -> dict[str, Any] | State[Any]:
    """Runs the flow `finetune` for a caller.

    Args:
        caller: The code that calls the flow in this process.
        recipe: As for the flow.
        overrides: As for the flow.
        force: As for the flow.
        launches_early: Whether to plan the run first, and to start the program of a training that will certainly run.
        sweep: The sweep that has chosen the settings.
        recorded: The lock of the run that is reproduced.
    """
    run = str(flow_run.get_id())
    with events.emit_heartbeats(run), early_launches():
        complete, forced = parse(recipe.model_dump(exclude_unset=True), overrides), frozenset(force or ())
        if launches_early and not lock_file(run).is_file():  # a retry uses the content that the first try has found
            with contextlib.suppress(UserError, MlflowFailed):  # the stages meet the same error, and report it
                planner = Planner(complete.name, forced, open_remote())
                launch_training_early(complete, planner, pipeline(planner, complete).lock)
        return fine_tune(caller, complete, forced, sweep=sweep, recorded=recorded)


def fine_tune(
    caller: Caller,
    recipe: Recipe,
    force: frozenset[str] = frozenset(),
    changes: Sequence[str] = (),
    extra: Mapping[str, Any] = MappingProxyType({}),
    *,
    sweep: FromSweep | None = None,
    recorded: Lock | None = None,
) -> dict[str, Any] | State[Any]:
    """Runs all stages in the current flow run. Returns the run's result, or the state of a failed run.

    Args:
        caller: The code that calls the flow in this process.
        recipe: All that makes the model.
        force: Stages to run although their output is stored.
        changes: The changes since the last completed run, if known.
        extra: Further fields of the result, plain JSON.
        sweep: The sweep that has chosen the settings.
        recorded: The lock of the run that is reproduced, whose names are not resolved again.
    """
    run, remote = str(flow_run.get_id()), open_remote()
    tracking = start_tracking(recipe, run, changes, parent=sweep.run if sweep else None)
    with in_use(caller.report_removal), closing(tracking) as tracker:
        untrusted_code.record_code(run, recipe)
        progress = PrefectProgress(lambda: tracker.pages)
        remote.deliver_earlier()
        executor = Executor(recipe.name, run, (tracker, progress, *caller.listeners), force, remote)
        finished, error = _run_stages(executor, recipe, sweep.selection if sweep else None, recorded)
        if isinstance(error, UserError):
            tracker.log_text(
                "problems.json", json.dumps([problem.model_dump() for problem in error.problems], indent=1)
            )
            if executor.rows and executor.rows[-1].name in STAGES_WITH_REPORT:
                progress.refused(error.problems)
        state = state_of(error)
        record_lineage(tracker, recipe, run, state, executor.rows, finished)
        warnings = executor.end_uploads(wait=state != "interrupted")
        server_down = caller.is_command and not flow_runs.server_answers()
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
        caller.send(result)
        if server_down:
            flow_runs.save_final_state(run, PREFECT_STATE[state])
            raise Abort("the Prefect server is down")  # the only end of a flow that sends the server nothing
        if state != "interrupted":
            champion = str(finished.champion) if finished and finished.champion else None
            events.emit_verdict(recipe.name, build_verdict_event(recipe, result, champion))
        return fail(error) if error else result


def _run_stages(
    executor: Executor, recipe: Recipe, selection: Selection | None, recorded: Lock | None
) -> tuple[Finished | None, BaseException | None]:
    """Returns the results of the stages, or the error that ended them."""
    try:
        return pipeline(executor, recipe, selection, recorded), None
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
