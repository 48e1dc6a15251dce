"""The flow `sweep`: searches the settings of a recipe, and releases the best model by the ordinary flow."""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import yaml
from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows import finetune
from flows.naming import sweep_run_name
from flows.pipeline import prepare
from flows.plan import divide_gpus
from flows.reports.result import list_problems
from flows.reports.sweep_table import SweepTerminal
from flows.search import Search, summarize_trial
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.results import Selection
from tasks.cache.stage import Listener
from tasks.home import home
from tasks.jobs import warm
from tasks.jobs.engines.local import early_launches
from tasks.jobs.launch import JobFailed
from tasks.prefect import events
from tasks.prefect.artifacts import ArtifactSender, PrefectProgress, Table
from tasks.registry import untrusted_code
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.fit import engine_for
from tasks.sweeps.pictures import draw_pictures
from tasks.sweeps.study import Study, only_sweep, study_key
from tasks.sweeps.trial import Trial
from tasks.tracking.connection import MlflowFailed
from tasks.tracking.run_tracker import RunTracker
from tasks.tracking.tracker import STUDY_TAG
from training.problems import UserError, full_disk
from training.recipe import Recipe, Sweep, parse, parse_sweep

MLFLOW_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

terminal: contextvars.ContextVar[SweepTerminal | None] = contextvars.ContextVar("terminal", default=None)
"""The table of `finetune sweep`; elsewhere Prefect and MLflow show the trials."""


@flow(name="sweep", flow_run_name=sweep_run_name)
def sweep(
    recipe: Recipe, sweep: Sweep, overrides: dict[str, Any] | None = None, trials: int | None = None
) -> dict[str, Any] | State[Any]:
    """Searches the settings of a recipe, and releases the best model.

    Args:
        recipe: All that makes the model, except the settings that are searched.
        sweep: The fields to search, and how.
        overrides: Fields of the recipe by dotted name, such as {"training.learning_rate": 3e-5}.
        trials: The number of trials, instead of the sweep's own.
    """
    values = recipe.model_dump(exclude_unset=True)
    with events.emit_heartbeats(str(flow_run.get_id())), events.without_prefect_heartbeats(), early_launches():
        _, search = parse_sweep(values, sweep.model_dump(exclude_unset=True), overrides, trials)
        return _run_sweep(values, search, dict(overrides or {}))


def _run_sweep(values: dict[str, Any], sweep: Sweep, overrides: dict[str, Any]) -> dict[str, Any] | State[Any]:
    overrides |= divide_gpus(parse(values, overrides), sweep)
    recipe, run = parse(values, overrides), str(flow_run.get_id())
    table, followers = terminal.get() or SweepTerminal(sweep, quiet=True), finetune.listeners.get()
    with in_use(finetune.report_removal), closing(RunTracker(recipe.name, run, str(flow_run.get_name()))) as tracker:
        tracker.log_params({f"sweep.{name}": _text(value) for name, value in sweep.model_dump(mode="json").items()})
        documents = {"recipe": recipe.model_dump(mode="json"), "sweep": sweep.model_dump(mode="json")}
        tracker.log_text("sweep.yaml", yaml.safe_dump(documents, sort_keys=False))
        untrusted_code.record_code(run, recipe)
        progress = PrefectProgress(lambda: tracker.pages)
        remote = open_remote()
        remote.deliver_earlier()
        executor = Executor(recipe.name, run, (tracker, progress, *followers), remote=remote)
        result: dict[str, Any] = {"flow_run_id": run, "study": None, "trials": [], "best": None, "run": None}
        error: BaseException | None = None
        try:
            with engine_for(recipe).keep_open(several=sweep.parallel > 1):
                _search(values, overrides, sweep, executor, run, table, tracker, result)
        except BaseException as ended:
            error = full_disk(home(), ended) or ended
        state = "completed" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
        table.close()
        warnings = executor.end_uploads(wait=state != "interrupted")
        progress.end()
        place = executor.rows[-1].name if executor.rows and result["study"] is None else "sweep"
        problems = [*list_problems(error, place), *((result["run"] or {}).get("problems") or [])]
        failed = state == "completed" and result["run"]["state"] != "completed"
        result |= {"state": result["run"]["state"] if failed else state, "problems": problems}
        result["metrics"] = (result["run"] or {}).get("metrics", {})
        tracker.end(MLFLOW_STATUS[result["state"]])
        result |= {"mlflow_run_id": tracker.mlflow_run_id, "warnings": [*warnings, *tracker.warnings]}
        for follower in followers:
            follower.run_ended(result)
        if result["state"] == "completed":
            return result
        if isinstance(error, UserError | JobFailed | MlflowFailed) or error is None:
            return Failed(message="\n".join(f"{problem['where']}: {problem['message']}" for problem in problems))
        raise error


def _search(
    values: dict[str, Any],
    overrides: dict[str, Any],
    sweep: Sweep,
    executor: Executor,
    run: str,
    table: SweepTerminal,
    tracker: RunTracker,
    result: dict[str, Any],
) -> None:
    """Prepares the data, runs the trials, and releases the best. Fills the result as far as it gets."""
    recipe = parse(values, overrides)
    ready = prepare(executor, recipe)
    warm.start()  # threads of several trials would each start one
    key = study_key(recipe, sweep, ready.lock, ready.data, ready.model)
    with only_sweep(key), _table_artifact() as show:
        study = Study(key, recipe, sweep)
        tracker.set_tags({STUDY_TAG: study.name})
        result["study"] = study.name
        search = Search(recipe, sweep, study, ready, run, table, show)
        try:
            search.run_trials()
        except BaseException:
            with contextlib.suppress(Exception):  # the error that ended the search is the one to report
                result["trials"] = [summarize_trial(trial) for trial in study.trials]
            raise
        result["trials"] = [summarize_trial(trial) for trial in study.trials]
        _log_trials(tracker, study, sweep)
        best = study.best
        if best is None:
            message = "no trial has completed: raise sweep.trials or sweep.timeout_s, or correct the failed trials."
            raise UserError.of("sweep", "sweep.trials", message)
        selection = _select(study, sweep, best, search.find_similar(best))
        result["best"] = {**summarize_trial(best), "similar": selection.similar, "summary": search.describe_best()}
        if versus := search.against_champion:
            result["best"]["champion"] = versus.model_dump(mode="json")
        if selection.similar:
            numbers = ", ".join(map(str, selection.similar))
            text = f"Trial {best.number} cannot be told apart from {numbers} on the rows of validation (paired test)."
            result["best"]["warning"] = text
            get_run_logger().warning(text)
    result["run"] = _release(values, {**overrides, **best.settings}, selection, run)


def _select(study: Study, sweep: Sweep, best: Trial, similar: list[int]) -> Selection:
    trials = study.trials
    return Selection(
        study=study.name,
        trial=best.number,
        trials=len(trials),
        completed=sum(trial.state == "completed" for trial in trials),
        metric=str(sweep.metric),
        direction=sweep.direction or "maximize",
        value=best.value or 0.0,
        sampler=sweep.sampler_name,
        pruner=sweep.pruner_name,
        settings=dict(best.settings),
        similar=similar,
    )


def _release(values: dict[str, Any], overrides: dict[str, Any], selection: Selection, run: str) -> dict[str, Any]:
    """Runs the ordinary flow with the chosen settings, whose training is stored. Returns its result."""
    keeper = _Keeper()
    listeners = finetune.listeners.set((*finetune.listeners.get(), keeper))
    sweep = finetune.from_sweep.set(finetune.FromSweep(selection, run))
    try:
        state = finetune.finetune(recipe=parse(values), overrides=overrides, return_state=True)
    finally:
        finetune.from_sweep.reset(sweep)
        finetune.listeners.reset(listeners)
    if keeper.result is None:
        state.result()  # raises the error of a flow that failed outside its stages
    assert keeper.result is not None
    return keeper.result


class _Keeper(Listener):
    """Keeps the result of a run."""

    result: dict[str, Any] | None = None

    def run_ended(self, result: dict[str, Any]) -> None:
        """Keeps it."""
        self.result = result


@contextlib.contextmanager
def _table_artifact() -> Iterator[Any]:
    """Yields a function that shows the table of trials on the page of the flow run."""
    artifacts = ArtifactSender()

    def show(rows: list[dict[str, str]], headline: str) -> None:
        if rows:
            artifacts.put("trials", Table(rows, headline))

    try:
        yield show
    finally:
        artifacts.end()


def _log_trials(tracker: RunTracker, study: Study, sweep: Sweep) -> None:
    """Logs the values of the trials, the table and the pictures of the study to the sweep's MLflow run."""
    trials, best = study.trials, study.best
    for trial in trials:
        if trial.value is not None:
            tracker.log_points({f"trials/{sweep.metric}": trial.value}, trial.number)
    if best is not None and best.value is not None:
        chosen = "\n".join(f"- `{field}`: {value}" for field, value in best.settings.items())
        tracker.describe(f"Trial {best.number}: {sweep.metric} {best.value:.4g}\n\n{chosen}")
    tracker.log_text("trials.json", json.dumps([summarize_trial(trial) for trial in trials], indent=1))
    for picture in draw_pictures(study, str(sweep.metric)):
        tracker.log_file(picture, "pictures")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
