"""`finetune plan FILE`: what is cached, what would run, and why, and what training would need. Downloads nothing."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import yaml

from flows.changes import changes, nothing_changed
from flows.cli.arguments import add_recipe_arguments, chosen_recipe
from flows.planned import planned
from flows.reports.lines import line
from flows.reports.tables import problem_line
from tasks.cache import settings
from tasks.cache.planner import PlannedStage, Planner
from tasks.cache.refs import Lock
from tasks.hub.push import publishing_problems
from tasks.stages.fit import fit, launch, training_job
from tasks.stages.preflight.training_estimate import estimate_lines
from training.recipe import Recipe

RUNNING = ("will run", "may run")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("plan", help="show what a run would do, and why", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--show-launch", action="store_true", help="also show how training would be launched here")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints a line a stage. Raises UserError for mistakes in the file and the names in the recipe."""
    recipe = chosen_recipe(arguments)
    planner = Planner(recipe.name)
    finished, unchecked = planned(recipe, planner, runs=False)
    lock = finished.lock
    for row in planner.rows:
        print(line(row.name, row.state, "", "; ".join(row.reasons)), flush=True)
    training = next(row for row in planner.rows if row.name == "fit")
    for estimated in _estimate(planner, training) if training.state in RUNNING else ():
        print(f"  fit: {estimated}")
    if unchecked:
        print(f"  fit: {unchecked}")
    for problem in publishing_problems(recipe) if any(row.state in RUNNING for row in planner.rows) else ():
        print(problem_line(problem.model_dump() | {"level": "warning"}))  # set by then, perhaps
    print(_summary(recipe, planner.rows))
    if arguments.show_launch:
        print(_launch(recipe, lock, training.key or "KEY"))
    return 0


def _estimate(planner: Planner, training: PlannedStage) -> list[str]:
    """The lines with training's steps, memory and disk."""
    if training.key is None:
        return ["steps, tokens, memory and disk: ?, until the stages before it have run"]
    arguments = planner.arguments["fit"]
    return estimate_lines(training.key, fit.flat_inputs(*arguments)[0], *training_job(*arguments))


def _launch(recipe: Recipe, lock: Lock, key: str) -> str:
    """The command that trains, with what it adds to the environment; and what accelerate or DeepSpeed is given."""
    described = launch(recipe, lock, key).as_json(settings.home() / "jobs" / key)
    lines = [f"{name}={shlex.quote(value)}" for name, value in described["environment"].items()]
    parts = ["\n" + " \\\n".join([*lines, shlex.join(described["argv"])])]
    if described["configuration"]:
        parts.append(yaml.safe_dump({recipe.compute.strategy: described["configuration"]}, sort_keys=False).rstrip())
    return "\n\n".join(parts)


def _summary(recipe: Recipe, rows: list[PlannedStage]) -> str:
    will, may = ([row for row in rows if row.state == state] for state in RUNNING)
    if will:
        return f"{len(will)} of {len(rows)} stages will run{f', and perhaps {len(may)} more' if may else ''}."
    if nothing_changed(recipe.name, rows) is None:
        return f"Every output is stored, and no run has completed with them: {changes(recipe.name, rows)[0]}."
    return "Nothing changed."
