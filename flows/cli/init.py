"""Write a recipe for a file of rows: what can be inferred is filled in, and each guess says why."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from flows.cli.shared import COMPLETED
from training.data.infer_reading import SAMPLE_ROWS, Choice, Sample, sample_rows
from training.problems import UserError, nearest
from training.recipe import load
from training.recipe.infer_task import TaskGuess, guess_tasks
from training.recipe.starting_recipe import SCRATCH, BaseModelChoice, as_yaml, starting_recipe
from training.recipe.tables.base_models import SIZES

FOLDER = Path("deployments")
SCHEMA = FOLDER / "schema" / "finetune-0.1.0.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a file, folder, glob or URL of rows, or module:name of an object")
    parser.add_argument("--name", help="the recipe's name (default: from PATH)")
    parser.add_argument("--task", help="the task type, if several fit the rows")
    parser.add_argument(
        "--model",
        default="small",
        help=f"{', '.join(SIZES)}: a pretrained model of this size from the Hub; a folder with a model; a name of the "
        f"Hub; or {SCRATCH}: random weights, without a network (default: small)",
    )
    parser.add_argument("--yes", action="store_true", help="take every guess; ask nothing on a terminal")
    parser.add_argument("--force", action="store_true", help="replace a recipe of this name")


def execute(arguments: argparse.Namespace) -> int:
    """Writes deployments/NAME.yaml. Raises UserError if no rows are found, or if no task type fits them."""
    name = arguments.name or _name_of(arguments.path)
    file = FOLDER / f"{name}.yaml"
    if file.exists() and not arguments.force:
        message = f"{file} exists: choose another name by --name, or replace it by --force."
        raise UserError.of("option", "--name", message)
    sample = sample_rows(arguments.path)
    guesses = guess_tasks(sample.columns)
    asks = not arguments.yes and sys.stdin.isatty() and sys.stdout.isatty()
    guess = _choose_task(guesses, arguments.task, sample, asks=asks)
    sample, guess = _named(sample, guess)
    model = arguments.model
    if asks and model == "small":
        model = _ask("Base model: small, medium, large, scratch, a folder, or a name of the Hub", model)
    choice = BaseModelChoice(model, is_folder=Path(model).expanduser().is_dir())
    fields = starting_recipe(name, sample, guess, guesses, choice)
    header = [f"Written by `finetune init {arguments.path}` from the first {sample.rows:,} rows."]
    if SCHEMA.exists():
        header.insert(0, f"yaml-language-server: $schema={SCHEMA.relative_to(FOLDER)}")
    FOLDER.mkdir(exist_ok=True)
    written = as_yaml(fields, header)
    file.write_text(written, encoding="utf-8")
    _print(file, fields["task"], sample)
    load(file, {})
    return COMPLETED


def _name_of(path: str) -> str:
    """A recipe's name from that of a file, folder or object."""
    last = re.split(r"[/:]", path.rstrip("/*"))[-1].partition(".")[0]
    name = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")
    return name or "recipe"


def _choose_task(guesses: list[TaskGuess], wanted: str | None, sample: Sample, *, asks: bool) -> TaskGuess:
    columns = ", ".join(sample.columns)
    tasks = [guess.task for guess in guesses]
    if not guesses:
        message = f"no task type fits rows with the columns {columns}: write the recipe as in README.md."
        raise UserError.of("option", "PATH", message)
    if wanted is None and asks and len(guesses) > 1:
        for guess in guesses:
            print(f"  {guess.task}: {guess.reason}")
        wanted = _ask("Task type", tasks[0])
    if wanted is None:
        return guesses[0]
    if wanted not in tasks:
        message = f"{wanted!r} does not fit rows with the columns {columns}: choose from {', '.join(tasks)}."
        raise UserError.of("option", "--task", f"{message}{nearest(wanted, tasks)}")
    return guesses[tasks.index(wanted)]


def _named(sample: Sample, guess: TaskGuess) -> tuple[Sample, TaskGuess]:
    """Names the columns of a file without a header by their roles."""
    if sample.has_names or "header" not in sample.fields:
        return sample, guess
    roles = dict(zip(guess.data.get("text", ()), ("text", "text_pair"), strict=False))
    roles |= {guess.data["label"]: "label"} if "label" in guess.data else {}
    roles |= {name: role for role, name in guess.data.get("columns", {}).items()}

    def renamed(value: object) -> object:
        if isinstance(value, list):
            return [roles.get(one, one) for one in value]
        if isinstance(value, dict):
            return {key: roles.get(one, one) for key, one in value.items()}
        return roles.get(value, value) if isinstance(value, str) else value

    header = sample.fields["header"]
    fields = {**sample.fields, "header": replace(header, value=renamed(header.value))}
    columns = {roles.get(name, name): values for name, values in sample.columns.items()}
    data = {key: renamed(value) for key, value in guess.data.items()}
    texts = [roles.get(name, name) for name in guess.texts]
    return replace(sample, fields=fields, columns=columns), replace(guess, data=data, texts=texts)


def _ask(question: str, default: str) -> str:
    return input(f"{question} [{default}]: ").strip() or default


def _print(file: Path, task: Choice, sample: Sample) -> None:
    more = "first " if sample.rows >= SAMPLE_ROWS else ""
    print(f"{file}: {task.value}, from the {more}{sample.rows:,} rows. {task.reason[:1].upper()}{task.reason[1:]}.")
    print("Read it, then:")
    print(f"  finetune check {file}")
    print(f"  finetune run   {file}")
