"""`finetune plan FILE`: what is cached, what would run, and why, and what training would need. Downloads nothing."""

from __future__ import annotations

import argparse
from typing import Any

from flows.commands.arguments import add_recipe_arguments, chosen_recipe
from flows.pipeline import pipeline
from flows.terminal import line
from tasks.fit import foreseen
from tasks.runtime.looking import Foreseen, Looking
from tasks.runtime.stage import Stage


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("plan", help="show what a run would do, and why", description=__doc__)
    add_recipe_arguments(parser)
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints a line a stage. Raises UserError for mistakes in the file and the names in the recipe."""
    recipe = chosen_recipe(arguments)
    looking, inputs = Looking(recipe.name), {}

    def look(stage: Stage[Any], *given: Any) -> Any:
        inputs[stage.name] = given
        return looking(stage, *given)

    pipeline(look, recipe)
    for row in looking.rows:
        print(line(row.name, row.state, "", "; ".join(row.reasons)), flush=True)
    if any((row.name, row.state) == ("fit", "will run") for row in looking.rows):
        for needs in foreseen(*inputs["fit"]):
            print(f"  fit: {needs}")
    print(_summary(looking.rows))
    return 0


def _summary(rows: list[Foreseen]) -> str:
    running = [row.name for row in rows if row.state == "will run"]
    return f"{len(running)} of {len(rows)} stages will run." if running else "Nothing changed."
