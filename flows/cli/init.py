"""The command `init`: a recipe for a file of rows."""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import version
from pathlib import Path

from flows.cli.shared import COMPLETED
from tasks.home import find_replaceable
from tasks.stages.preflight.gate_power import describe_few_rows
from tasks.starting_recipe import MODELS, RowsFound, as_yaml, find_rows, values_of
from training.jobs.protocol import write_atomically
from training.problems import UserError
from training.recipe import parse

FOLDER = Path("deployments")
SCHEMA = FOLDER / "schema" / f"finetune-{version('finetune-flows')}.json"


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="+",
        help="a file, folder, glob or URL of rows, owner/name of a data set of the Hub, or module:name of an object",
    )
    parser.add_argument("--name", help="the recipe's name (default: from PATH)")
    parser.add_argument("--task", help="the task type, if several fit the rows")
    parser.add_argument("--config", help="the subset of a data set of the Hub that has several")
    parser.add_argument(
        "--model",
        default="small",
        help="small, medium or large: a pretrained model of the Hub; scratch: random weights, without a network; a "
        "folder with a model; or a name of the Hub (default: small)",
    )
    parser.add_argument("--yes", action="store_true", help="take every guess; ask nothing on a terminal")
    parser.add_argument("--force", action="store_true", help="replace a recipe of this name")


def init(arguments: argparse.Namespace) -> int:
    """Write a recipe for a file of rows, with the reason of each guess as a comment."""
    path, *others = arguments.path
    if others:
        message = (
            f"{len(arguments.path):,} paths are given: give a folder, or a glob in quotation marks, such as '*.csv'."
        )
        raise UserError.of("option", "PATH", message)
    name = arguments.name or _name_of(path)
    file = FOLDER / f"{name}.yaml"
    if file.exists() and not arguments.force:
        message = f"{file} exists: choose another name by --name, or replace it by --force."
        raise UserError.of("option", "--name", message)
    found = find_rows(path, arguments.config)
    asks = not arguments.yes and sys.stdin.isatty() and sys.stdout.isatty()
    task, model = arguments.task, arguments.model
    if asks and task is None:
        task = _ask_for_task(found)
    if asks and model == MODELS[0]:
        model = _ask(f"Base model ({', '.join(MODELS)}, a folder, or a name of the Hub)", model)
    fields = found.recipe(name, task, model)
    header = [
        f"Written by `finetune init {path}` from the {found.described_rows}. A value with a comment is a guess: the",
        "comment has the reason, and after `else` the second-best value.",
    ]
    if SCHEMA.exists():
        header.insert(0, f"yaml-language-server: $schema={SCHEMA.relative_to(FOLDER)}")
    recipe = parse(values_of(fields))
    try:
        FOLDER.mkdir(mode=0o775, exist_ok=True)
        if foreign := find_replaceable(file.absolute()):
            message = (
                f"{foreign} belongs to another user or may be written by others, who could change {file} before it "
            )
            raise UserError.of("option", "--name", f"{message}is run: call the command in a folder of yours.")
        write_atomically(file, as_yaml(fields, header).encode())
    except OSError as error:
        message = f"{file} cannot be written ({error.strerror}): call the command in a folder where it can."
        raise UserError.of("option", "--name", message) from error
    print(f"{file}: {fields['task'].value}, from the {found.described_rows}: {fields['task'].reason}.")
    if found.few_rows:
        print(f"The rows are few: {found.few_rows}.")
    elif found.test_rows is not None and (few := describe_few_rows(recipe, found.test_rows)):
        print(f"About {few}")
    print("Each guess in it has a comment. Next:")
    print(f"  finetune check {file}\n  finetune run   {file}\n  finetune serve {name}")
    return COMPLETED


def _name_of(path: str) -> str:
    """A recipe's name from that of a file, folder or object; of a glob, from the last part without a wildcard."""
    parts = [part for part in re.split(r"[/:]", path) if part and not set(part) & set("*?[")]
    name = re.sub(r"[^a-z0-9]+", "-", parts[-1].partition(".")[0].lower()).strip("-") if parts else ""
    return name or "recipe"


def _ask_for_task(found: RowsFound) -> str | None:
    if len(found.guesses) < 2:
        return None
    for guess in found.guesses:
        print(f"  {guess.task}: {guess.reason}")
    return _ask("Task type", found.guesses[0].task)


def _ask(question: str, default: str) -> str:
    try:
        return input(f"{question} [{default}]: ").strip() or default
    except EOFError:
        return default
