"""The plan of a recipe: its stages, whether a run would change anything, and why."""

from __future__ import annotations

from typing import Any

from flows.pipeline import Finished, pipeline
from tasks.cache.history import History
from tasks.cache.planner import PlannedStage, Planner
from tasks.cache.results import Lock
from tasks.cache.stage import without_number
from tasks.jobs.hardware import visible_gpus
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.fit import engine_for, launch_early
from tasks.stages.preflight.model_check import CheckedModel, require_model
from tasks.tracking.connection import MlflowFailed, read_aliases
from tasks.tracking.mlflow_run import deliver_earlier_runs
from training.problems import NETWORK, Problem, UserError, collected
from training.recipe import Recipe, Sweep


def plan_stages(recipe: Recipe, planner: Planner, *, before_run: bool) -> tuple[Finished, CheckedModel]:
    """Plans all stages and checks the model if training would run. Returns the plan's results, and the notes and
    warnings on the model.

    `before_run` allows downloading config.json, requires the cluster if training would run on one, and skips a model
    from scratch without adapters and exports, because load_model builds it at once. Raises UserError with the problems
    of the stages, the cluster and the model together.
    """
    problems: list[Problem] = []
    finished, checked = None, CheckedModel()
    with collected(problems):
        finished = pipeline(planner, recipe)
    trains = finished is None or any(_trains(row) and row.state != "cached" for row in planner.rows)
    plain = recipe.training.lora is None and not recipe.release.exports
    built_soon = before_run and recipe.model.source == "scratch" and plain
    if trains and before_run:
        problems += engine_for(recipe).find_address_problems()
    if trains and not built_soon:
        try:
            checked = require_model(recipe, finished.lock if finished else Lock(), download=before_run)
        except UserError as error:
            if all(problem.kind == NETWORK for problem in error.problems):
                checked = CheckedModel(notes=[f"the model was not checked. {error}"])
            else:
                problems += (problem for problem in error.problems if problem not in problems)
    if problems or finished is None:
        raise UserError(problems)
    return finished, checked


def divide_gpus(recipe: Recipe, sweep: Sweep) -> dict[str, Any]:
    """The override of compute.num_processes with which trials that run at once share this machine's GPUs. Raises
    UserError if there are too few GPUs for the trials at once."""
    gpus = len(visible_gpus()) if engine_for(recipe).runs_here else 0
    if sweep.parallel == 1 or not gpus:
        return {}
    wanted = recipe.compute.num_processes
    each = 1 if wanted == "auto" else wanted
    if gpus < sweep.parallel * each:
        message = f"{sweep.parallel} trials at once need {sweep.parallel * each} GPUs, and there are {gpus}: lower it."
        raise UserError.of("sweep", "sweep.parallel", message)
    return {"compute.num_processes": gpus // sweep.parallel} if wanted == "auto" else {}


def launch_training_early(recipe: Recipe, planner: Planner, lock: Lock) -> None:
    """Starts the launcher of a training that will certainly run, by the plan."""
    if any(_trains(row) and row.state == "will run" for row in planner.rows):
        launch_early(recipe, lock)


def _trains(row: PlannedStage) -> bool:
    return without_number(row.name) in ("fit", "fit_fold")


def find_unchanged_run(recipe: str, rows: list[PlannedStage]) -> dict[str, Any] | None:
    """Returns the result of the last completed run if a new one would repeat it, else None.

    The key of `resolve` is ignored: it contains the whole recipe, and the other keys contain the parts that matter.
    """
    last = History(recipe).last_completed()
    if last is None or any(row.state == "will run" for row in rows) or _stage_keys(last) != _planned_keys(rows):
        return None
    return last


def build_cached_result(recipe: Recipe, last: dict[str, Any]) -> dict[str, Any]:
    """Builds the result of a run that repeats the run `last`, with the alias that its version has now. Delivers what
    MLflow and the shared store still lack of other runs."""
    remote = open_remote()
    remote.deliver_earlier()
    trouble, warnings = deliver_earlier_runs(), remote.end_run(wait=True)
    if trouble:
        warnings.append(f"MLflow has not everything yet ({trouble}).")
    alias = None
    if last["model"]["registered"]:
        name, _, number = last["model"]["registered"].partition("/")
        try:
            aliases = read_aliases(name)
        except MlflowFailed as error:
            aliases = {}
            warnings.append(f"Whether version {number} is the {recipe.release.champion} now is unknown: {error}")
        usual = (recipe.release.champion, recipe.release.challenger)
        alias = next((one for one in (*usual, *sorted(aliases)) if aliases.get(one) == number), None)
    return {
        **last,
        "model": {**last["model"], "alias": alias},
        "stages": [{**stage, "state": "cached", "seconds": 0.0} for stage in last["stages"]],
        "warnings": warnings,
    }


def list_changes(recipe: str, rows: list[PlannedStage]) -> list[str]:
    """Lists why stages would run, one line for each stage whose own inputs changed, such as
    `fit: training.learning_rate 2e-05 → 3e-05`."""
    known = [row for row in rows if row.state == "will run" and row.key]
    of_fit = [row.reasons for row in known if row.name == "fit"]
    # Folds that change for the reasons of the model's own training need no line.
    shown = [row for row in known if without_number(row.name) != "fit_fold" or row.reasons not in of_fit]
    changes = [f"{row.name}: {'; '.join(row.reasons)}" for row in shown]
    if changes:
        return changes
    last = History(recipe).last_completed()
    if last is None:
        return ["no run has completed before"]
    before, now = _stage_keys(last), _planned_keys(rows)
    changes = [f"{name}: its inputs are different" for name, key in now.items() if before.get(name) != key]
    return changes + [f"{name}: no longer part of a run" for name in before.keys() - now.keys()]


def _planned_keys(rows: list[PlannedStage]) -> dict[str, str | None]:
    return {row.name: row.key for row in rows if row.name != "resolve"}


def _stage_keys(result: dict[str, Any]) -> dict[str, str | None]:
    return {stage["name"]: stage["key"] for stage in result["stages"] if stage["name"] != "resolve"}
