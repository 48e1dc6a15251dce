"""The command `plan`: the stages of a run or of a sweep, and their costs."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import yaml
from pydantic import ValidationError

from flows.cli.shared import COMPLETED, add_recipe_arguments, load_recipe
from flows.pipeline import Scored, train_and_score
from flows.plan import divide_gpus, find_unchanged_run, list_changes, plan_stages
from flows.reports.tables import mixture_lines, problem_line
from flows.reports.terminal import Terminal, stage_line
from tasks.cache import store
from tasks.cache.history import History
from tasks.cache.planner import PlannedStage, Planner
from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import without_number
from tasks.home import home
from tasks.hub.client import find_publishing_problems
from tasks.jobs.job import job_of
from tasks.reports.row_reports import read_report
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.fit import engine_for, fit, launch, resolved_compute
from tasks.stages.preflight.gate_power import JudgedEntries, expect_comparison, find_obstacles
from tasks.stages.preflight.teacher_cost import teacher_line
from tasks.stages.preflight.training_estimate import estimate_folds, estimate_lines
from tasks.stages.resolve import pin_variants
from tasks.stages.teacher_outputs import name_of_teacher
from tasks.sweeps.study import Study, only_sweep, study_key
from tasks.sweeps.trial_state import UNFINISHED, Trial
from tasks.tracking.connection import find_registry_problems
from training.problems import UserError
from training.recipe import ENTRYPOINT, SWEEP_ENTRYPOINT, Recipe, Sweep, load_sweep, parse, parse_set, read_entries

PENDING = ("will run", "may run")
TOKENIZERS = ("tokenize", "process_images")
FIRST_STAGES = {"model": ("load_model",), "tokens": TOKENIZERS, "options": TOKENIZERS}
"""The stages that first read a section of the recipe; fields of other sections first matter to fit."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--sweep", action="store_true", help="plan the file's sweep instead of a run of its recipe")
    parser.add_argument("--show-launch", action="store_true", help="also show the command that launches training here")


def plan(arguments: argparse.Namespace) -> int:
    """Show which stages a run would execute, why, and the memory and disk that training needs.

    With --sweep, or for a file that has only a sweep, shows what its trials share and cost.

    Downloads nothing but artifacts of the shared store.
    """
    if arguments.sweep or _has_only_sweeps(arguments.file):
        if arguments.show_launch:
            message = "is for the training of a run, and a sweep has several: leave it out."
            raise UserError.of("option", "--show-launch", message)
        return _show_sweep(arguments)
    recipe = load_recipe(arguments)
    remote, terminal = open_remote(), Terminal()
    planner = Planner(recipe.name, remote=remote, fetch_progress=terminal.fetch_progress_of)
    finished, checked = plan_stages(recipe, planner, before_run=False)
    terminal.close()
    for row in planner.rows:
        print(stage_line(row.name, row.state, "", "; ".join(row.reasons)), flush=True)
    for text in _mixture(recipe, finished.data):
        print(f"  load_data: {text}")
    for text in _teacher(planner):
        print(f"  teacher_outputs: {text}")
    training = next(row for row in planner.rows if row.name == "fit")
    for text in _estimate(planner, training) if training.state in PENDING else ():
        print(f"  fit: {text}")
    for note in checked.notes:
        print(f"  fit: {note}")
    for text in _folds(recipe, planner, finished.data):
        print(f"  folds: {text}")
    for text in _obstacles(recipe, planner, finished.data):
        print(f"  gate: {text}")
    if training.state in PENDING and (machines := engine_for(recipe).describe(resolved_compute(recipe, finished.lock))):
        print(f"  fit: {machines}")
    for problem in checked.warnings:
        print(problem_line(problem.model_dump()))
    if any(row.state in PENDING for row in planner.rows):
        for problem in find_publishing_problems(recipe):  # a warning: the token may be set by then
            print(problem_line(problem.model_dump() | {"level": "warning"}))
        for problem in find_registry_problems(recipe):
            print(problem_line(problem.model_dump()))
    print(_summarize(recipe, planner.rows))
    for warning in remote.end_run(wait=False):
        print(warning, file=sys.stderr)
    if arguments.show_launch:
        print(_format_launch(recipe, finished.lock, training.key or "KEY"))
    return COMPLETED


def _has_only_sweeps(file: Path) -> bool:
    entrypoints = {entry.get("entrypoint") for entry in read_entries(file)}
    return SWEEP_ENTRYPOINT in entrypoints and ENTRYPOINT not in entrypoints


def _show_sweep(arguments: argparse.Namespace) -> int:
    recipe, sweep = load_sweep(arguments.file, parse_set(arguments.set), arguments.entry)
    terminal = Terminal()
    planner = Planner(recipe.name, remote=open_remote(), fetch_progress=terminal.fetch_progress_of)
    recipe = parse(recipe.model_dump(exclude_unset=True), divide_gpus(recipe, sweep))
    planned = train_and_score(planner, recipe)
    terminal.close()
    for row in planner.rows:
        print(stage_line(row.name, row.state, "", "; ".join(row.reasons)), flush=True)
    training = next(row for row in planner.rows if row.name == "fit")
    for text in _estimate(planner, training) if training.state in PENDING else ():
        print(f"  fit: {text}")
    print(*_summarize_sweep(recipe, sweep, planner, planned), sep="\n")
    return COMPLETED


def _teacher(planner: Planner) -> Iterator[str]:
    """Yields the cost of a teacher's outputs that are not stored."""
    if any(row.name == "teacher_outputs" and row.state in PENDING for row in planner.rows):
        recipe, lock, data, *more = planner.arguments["teacher_outputs"]
        yield teacher_line(name_of_teacher(recipe, lock), recipe, lock, data, more[0] if more else None)


def _estimate(planner: Planner, training: PlannedStage) -> list[str]:
    """Returns the lines with steps, memory and disk."""
    if training.key is None:
        return ["steps, tokens, memory and disk: ?, until the stages before it have run"]
    arguments = planner.arguments["fit"]
    job = job_of(fit, *arguments)
    return estimate_lines(training.key, fit.flatten_inputs(job)[0], job)


def _folds(recipe: Recipe, planner: Planner, data: object) -> Iterator[str]:
    """Yields what the trainings of folds share and cost; nothing for a recipe without folds."""
    states = [row.state for row in planner.rows if without_number(row.name) == "fit_fold"]
    if not states:
        return
    shared = ", ".join(name for name in _stages_before_fit(planner) if name != "resolve")
    cached, count = states.count("cached"), len(states)
    text = f"{count} trainings share {shared} with fit; {'all' if cached == count else cached or 'none'} "
    text += "is cached" if cached == 1 else "are cached"
    if cached < count and (seconds := _seconds_of_training(recipe, [], data)):
        text += f", and one takes about {seconds * (count - 1) / count:,.0f} s, by the last training here"
    yield text
    pending = [row.key for row in planner.rows if without_number(row.name) == "fit_fold" and row.state in PENDING]
    trained = next(row for row in planner.rows if row.name == "fit")
    if pending and trained.key is not None:
        job = job_of(fit, *planner.arguments["fit"])
        at_once = recipe.evaluation.parallel_folds if engine_for(recipe).runs_here else 1
        yield from estimate_folds(pending, fit.flatten_inputs(job)[0], job, at_once)


def _obstacles(recipe: Recipe, planner: Planner, data: object) -> list[str]:
    """Returns reasons why the rows that the gate judges by can promote no model, if these rows are stored."""
    pending = any(row.name in ("compare", "gate") and row.state in PENDING for row in planner.rows)
    if not isinstance(data, Artifact) or not pending or recipe.release.registry is None:
        return []
    if recipe.judged_split not in data.result.rows:  # an artifact of an earlier version of this project
        return []
    judged = JudgedEntries.of(recipe, data.path)
    return list(find_obstacles(recipe, judged.number, expect_comparison(recipe, data), judged.groups))


def _mixture(recipe: Recipe, data: object) -> list[str]:
    """Returns the sets of a mixture: their rows if they are stored, else their sources."""
    if isinstance(data, Artifact):
        return mixture_lines(read_report(data.path)) if recipe.data.mix else []
    listed = zip(recipe.data.set_names, recipe.data.mix or (), strict=False)
    return [f"{name}: {one.source} {one.path}{_share(one.weight, one.epochs)}" for name, one in listed]


def _share(weight: float | None, epochs: float | None) -> str:
    parts = [f", weight {weight:g}" if weight is not None else "", f", {epochs:g} epochs" if epochs is not None else ""]
    return "".join(parts)


def _format_launch(recipe: Recipe, lock: Lock, key: str) -> str:
    """Formats the training command, its environment variables, and the configuration of accelerate or DeepSpeed."""
    launched = launch(recipe, lock).as_json(home() / "jobs" / key)
    lines = [f"{name}={shlex.quote(value)}" for name, value in launched["environment"].items()]
    parts = ["\n" + " \\\n".join([*lines, shlex.join(launched["argv"])])]
    if launched["configuration"]:
        parts.append(yaml.safe_dump({recipe.compute.strategy: launched["configuration"]}, sort_keys=False).rstrip())
    return "\n\n".join(parts)


def _summarize(recipe: Recipe, rows: list[PlannedStage]) -> str:
    will, may = (sum(row.state == state for row in rows) for state in PENDING)
    if will:
        return f"{will} of {len(rows)} stages will run{f', and perhaps {may} more' if may else ''}."
    if find_unchanged_run(recipe.name, rows) is None:
        return f"Every output is stored, and no run has completed with them: {list_changes(recipe.name, rows)[0]}."
    return "Nothing changed."


def _stages_before_fit(planner: Planner) -> list[str]:
    """The stages whose outputs a training reads, and `resolve`."""
    before = takewhile(lambda row: row.name != "fit", planner.rows)
    return [row.name for row in before if row.name not in ("assign_folds", "load_must_hold")]


def _summarize_sweep(recipe: Recipe, sweep: Sweep, planner: Planner, planned: Scored) -> Iterator[str]:
    """What trials share, how many trainings there are at most, and what one costs."""
    sections = {name.partition(".")[0] for name in sweep.fields}
    varied = {stage for section in sections & FIRST_STAGES.keys() for stage in FIRST_STAGES[section]}
    shared = takewhile(lambda name: name not in varied, _stages_before_fit(planner))
    yield f"All trials share {', '.join(shared)}; they differ in {', '.join(sweep.fields)}."
    stored = _stored_trials(recipe, sweep, planned)
    left = (sweep.trials or 0) - len([trial for trial in stored if trial.state not in UNFINISHED])
    if left <= 0:
        yield f"All {sweep.trials} trials are stored."
        return
    text = f"At most {left} trainings, {sweep.parallel} at once"
    text += f" ({len(stored)} of {sweep.trials} trials are stored)" if stored else ""
    stops = "" if sweep.pruner_name == "none" else f", and {sweep.pruner_name} stops most of them early"
    yield f"{text}{stops}."
    if seconds := _seconds_of_training(recipe, stored, planned.data):
        yield f"One takes about {seconds:,.0f} s, by {'the stored trials' if stored else 'the last training here'}."


def _stored_trials(recipe: Recipe, sweep: Sweep, planned: Scored) -> list[Trial]:
    if not (isinstance(planned.data, Artifact) and isinstance(planned.model, Artifact)):
        return []
    of_variants = pin_variants(recipe, sweep.variants.values())
    key = study_key(recipe, sweep, planned.lock, planned.data, planned.model, of_variants)
    if not (home() / "sweeps" / key).is_dir():
        return []
    try:
        with only_sweep(key):
            return Study(key, recipe, sweep).trials
    except UserError:  # it is running: its study is not touched
        return []


def _seconds_of_training(recipe: Recipe, stored: list[Trial], data: object) -> float | None:
    """The mean time of the completed trials; without any, that of a training at the speed of the recipe's last one."""
    spent = [trial.seconds for trial in stored if trial.state == "completed"]
    if spent:
        return sum(spent) / len(spent)
    key = History(recipe.name).last_key("fit")
    last = store.manifest_of("fit", key) if key else None
    if last is None or not isinstance(data, Artifact):
        return None
    rows = (data.result.train_rows or 0) * recipe.training.num_train_epochs
    try:
        rate = fit.open(last[0]).result.train_rows_per_second
    except ValidationError:  # another version of this project made it
        return None
    return float(rows / max(rate, 1e-9))
