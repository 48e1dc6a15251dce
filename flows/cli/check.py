"""`finetune check FILE`: checks the model by its configuration and the rows one by one, and counts their tokens. Trains
nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_json_argument, add_recipe_arguments, chosen_recipe, need_writable
from flows.cli.codes import COMPLETED, FAILED, code_of, sigterm_interrupts
from flows.reports.lines import Terminal
from flows.reports.tables import label_lines, problem_lines, split_lines, summary, terminal_width
from tasks.cache.refs import Lock
from tasks.hub.push import publishing_problems
from tasks.stages.load_data import load_rows
from tasks.stages.preflight.model_check import require_model
from tasks.stages.preflight.token_check import count_tokens, find_tokenizer, has_exact_counts, scratch_folder
from tasks.stages.resolve import pin_data, pin_tokenizer
from tasks.stages.score import require_fitting, require_fitting_lengths
from tasks.tracking.reports import read_report
from training.jobs.protocol import write_atomically
from training.problems import NETWORK, UserError
from training.recipe import Recipe


@dataclass
class Found:
    """What was found of the rows."""

    rows: dict[str, Any] | None = None
    """The report on the rows; None where an error kept them from being read."""
    tokens: dict[str, Any] | None = None
    problems: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the user should know of what was not checked, or how names were resolved."""

    def as_json(self) -> dict[str, Any]:
        """Both reports in one, with the problems of both."""
        merged = {**(self.rows or {}), **(self.tokens or {})}
        return {**merged, "problems": self.problems, "notes": self.notes}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("check", help="check the rows of a recipe", description=__doc__)
    add_recipe_arguments(parser)
    add_json_argument(parser, "what was found")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where there are warnings")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints what was found. Raises UserError for mistakes in the file and the options."""
    need_writable(arguments.json)
    try:
        recipe = chosen_recipe(arguments)
    except UserError as error:
        _write(arguments.json, Found(problems=_dumped(error)))
        raise
    with sigterm_interrupts():
        found = _check(recipe)
    _write(arguments.json, found)
    _print(found)
    errors = [problem["kind"] for problem in found.problems if problem["level"] == "error"]
    if errors:
        return code_of(errors)
    return FAILED if arguments.strict and found.problems else COMPLETED


def _check(recipe: Recipe) -> Found:
    found, terminal = Found(), Terminal()
    # No error: the rows may be checked where nothing is published.
    found.problems += [problem.model_dump() | {"level": "warning"} for problem in publishing_problems(recipe)]
    with scratch_folder() as folder:
        model = _check_model(recipe, found, terminal)
        try:
            terminal.stage_started("resolve", "")
            lock = pin_data(recipe, terminal.progress_of("resolve"))
            found.notes += lock.notes
            terminal.stage_started("load_data", "")
            load_rows(recipe, lock, folder / "rows", terminal.progress_of("load_data"))
            found.rows = read_report(folder / "rows")
            found.problems += found.rows["problems"]
            found.problems += _told(require_fitting, recipe, folder / "rows")
            terminal.stage_started("tokenize", "")
            _count_tokens(recipe, model, folder, found, terminal)
        except UserError as error:
            found.problems += _dumped(error)
        finally:
            terminal.clear()
    return found


def _told(require: Callable[[Recipe, Path], None], recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    """What the recipe asks of these rows, or tokens, that they cannot have."""
    try:
        require(recipe, folder)
    except UserError as error:
        return _dumped(error)
    return []


def _check_model(recipe: Recipe, found: Found, terminal: Terminal) -> Lock | None:
    """Checks the model by its configuration. Returns what its name means, or None if the model cannot be had now."""
    terminal.stage_started("load_model", "")
    lock = None
    try:
        lock = pin_tokenizer(recipe)
        found.notes += lock.notes
        if unchecked := require_model(recipe, lock, download=True):
            found.notes.append(unchecked)
    except UserError as error:
        if all(problem.kind == NETWORK for problem in error.problems):
            found.notes.append(f"The model was not checked. {error}")
        else:
            found.problems += _dumped(error)
    return lock


def _count_tokens(recipe: Recipe, lock: Lock | None, folder: Path, found: Found, terminal: Terminal) -> None:
    """Counts the tokens if the tokenizer can be had. Raises UserError for what is wrong with the tokens."""
    if lock is None:
        found.notes.append("Token lengths were not checked: the model's tokenizer cannot be had.")
        return
    try:
        tokenizer = find_tokenizer(recipe, lock, folder / "rows", folder / "tokenizer")
    except UserError as error:
        found.notes.append(f"Token lengths were not checked. {error}")
        return
    exact = has_exact_counts(recipe, tokenizer)
    if recipe.model.start_from == "champion":
        found.notes.append("Tokens were counted by the base model's tokenizer: that of a champion may count otherwise.")
    elif not exact:
        found.notes.append("Tokens were counted by tokenizer.json alone: a run may count some rows a little otherwise.")
    progress = terminal.progress_of("tokenize")
    found.tokens = count_tokens(recipe, tokenizer, folder / "rows", folder / "tokens", progress)
    found.problems += found.tokens["problems"]
    found.problems += _told(require_fitting_lengths, recipe, folder / "tokens") if exact else []


def _dumped(error: UserError) -> list[dict[str, Any]]:
    return [problem.model_dump() for problem in error.problems]


def _print(found: Found) -> None:
    """The table on stdout: wrapped for a person, and a line a problem for everything else."""
    live, width = sys.stdout.isatty(), terminal_width()
    blocks = []
    if found.rows is not None:
        blocks += [split_lines(found.rows, found.tokens), label_lines(found.rows["labels"], width)]
    blocks += [found.notes, problem_lines(found.problems, width if live else None)]
    for block in filter(None, blocks):
        print("\n".join(block), end="\n\n")
    print(summary(found.problems))


def _write(out: Path | None, found: Found) -> None:
    if out is not None:
        text = json.dumps(found.as_json(), indent=2, ensure_ascii=False)
        write_atomically(out.absolute(), f"{text}\n".encode())
