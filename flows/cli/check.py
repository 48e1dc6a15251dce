"""The command `check`: the model's configuration, rows and tokens before a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.cli.shared import (
    COMPLETED,
    FAILED,
    add_json_argument,
    add_recipe_arguments,
    exit_code,
    load_recipe,
    write_json,
)
from flows.reports.tables import count_line, label_lines, mixture_lines, problem_lines, split_lines, terminal_width
from flows.reports.terminal import Terminal
from tasks.cache.results import Lock
from tasks.hub.client import find_publishing_problems
from tasks.reports.row_reports import read_report, summarize_corpus, summarize_corrections
from tasks.stages.folds import require_rows
from tasks.stages.load_data import (
    counts_tokens,
    leaves_out_refused,
    load_data_settings,
    load_rows,
    write_template_folder,
)
from tasks.stages.must_hold import load_must_hold_settings, read_must_hold
from tasks.stages.preflight.gate_power import JudgedEntries, describe_few_rows, expect_comparison, find_obstacles
from tasks.stages.preflight.model_check import require_model
from tasks.stages.preflight.token_check import (
    add_template,
    count_tokens,
    find_tokenizer,
    find_tokenizer_folder,
    has_exact_counts,
    scratch_folder,
)
from tasks.stages.preflight.training_estimate import find_improbable_rates
from tasks.stages.process_images import has_images
from tasks.stages.resolve import pin_data, pin_model, pin_must_hold
from tasks.stages.score import find_frequent_positive, require_fitting, require_fitting_lengths
from tasks.tracking.connection import MlflowFailed
from training.problems import NETWORK, Problem, UserError
from training.recipe import Recipe, parse


@dataclass
class CheckReport:
    """The results of all checks."""

    rows: dict[str, Any] | None = None
    """The report on the rows; None if an error prevented reading them."""
    tokens: dict[str, Any] | None = None
    """The report on the tokens; None if they were not counted."""
    problems: list[dict[str, Any]] = field(default_factory=list)
    vocab_size: int | None = None
    """The number of the model's tokens, if it is known."""
    notes: list[str] = field(default_factory=list)
    """Checks that were skipped, and versions to which names were resolved."""

    def add(self, error: UserError) -> None:
        """Adds the problems of an error."""
        self.problems += [problem.model_dump() for problem in error.problems]

    def as_json(self) -> dict[str, Any]:
        """Merges the two reports."""
        return {**(self.rows or {}), **(self.tokens or {}), "problems": self.problems, "notes": self.notes}


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_json_argument(parser, "the report")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there are warnings")


def check(arguments: argparse.Namespace) -> int:
    """Check the model's configuration and every row, and count tokens. Trains nothing."""
    report = CheckReport()
    try:
        recipe = load_recipe(arguments)
    except UserError as error:
        report.add(error)
        write_json(arguments.json, report.as_json())
        raise
    _check(recipe, report, Terminal())
    write_json(arguments.json, report.as_json())
    _print(report)
    errors = [problem["kind"] for problem in report.problems if problem["level"] == "error"]
    if errors:
        return exit_code(errors)
    return FAILED if arguments.strict and report.problems else COMPLETED


def _check(recipe: Recipe, report: CheckReport, terminal: Terminal) -> None:
    # Only warnings: rows can be checked on a machine that does not publish.
    warnings = [*find_publishing_problems(recipe), *find_improbable_rates(recipe)]
    report.problems += [problem.model_dump() | {"level": "warning"} for problem in warnings]
    with scratch_folder() as folder:
        model = _check_model(recipe, report, terminal)
        try:
            terminal.stage_started("resolve", "")
            lock = pin_data(recipe, terminal.progress_of("resolve"))
            report.notes += lock.notes
            terminal.stage_started("load_data", "")
            readable, tokenizer = _find_tokenizer_of_rows(recipe, model, folder, report)
            load_rows(load_data_settings(readable, lock), folder / "rows", terminal.progress_of("load_data"), tokenizer)
            report.rows = read_report(folder / "rows")
            report.problems += report.rows["problems"]
            report.notes += filter(None, [summarize_corrections(report.rows), summarize_corpus(report.rows)])
            _require(require_fitting, recipe, folder / "rows", report)
            if all(problem["where"] != "evaluation.folds" for problem in report.problems):
                _require(require_rows, recipe, folder / "rows", report)
            _require(_check_must_hold, recipe, folder, report)
            report.problems += [problem.model_dump() for problem in find_frequent_positive(recipe, folder / "rows")]
            _check_judged_rows(recipe, folder / "rows", report)
            if has_images(recipe):
                return
            terminal.stage_started("tokenize", "")
            _count_tokens(recipe, model, folder, report, terminal)
        except UserError as error:
            report.add(error)
        finally:
            terminal.clear()


def _find_tokenizer_of_rows(
    recipe: Recipe, lock: Lock | None, folder: Path, report: CheckReport
) -> tuple[Recipe, Path | None]:
    """The recipe whose rows can be read here, and the folder of the tokenizer that counts the weights of its mixture or
    whose chat template refuses rows. Without the tokenizer, weights are in characters, and no row is refused."""
    if not (counts_tokens(recipe) or leaves_out_refused(recipe)):
        return recipe, None
    template = recipe.model.chat_template and Path(recipe.model.chat_template).expanduser()
    if recipe.model.source == "scratch":  # its tokenizer is trained on the rows
        return recipe, write_template_folder(template, folder / "template") if template else None
    reason = "the model's tokenizer is not available."
    try:
        if lock is not None:
            tokenizer = find_tokenizer_folder(recipe, lock, folder / "rows", folder / "tokenizer")
            return recipe, add_template(tokenizer, template, folder / "template") if template else tokenizer
    except (UserError, MlflowFailed) as error:
        reason = str(error)
    if leaves_out_refused(recipe):
        report.notes.append(f"Rows that the chat template refuses were not looked for: {reason}")
    if not counts_tokens(recipe):
        return recipe, None
    report.notes.append(f"The mixture was weighted by characters instead of tokens: {reason}")
    return parse(recipe.model_dump(exclude_unset=True), {"data.weight_by": "characters"}), None


def _require(requirement: Callable[[Recipe, Path], None], recipe: Recipe, folder: Path, report: CheckReport) -> None:
    """Adds the problems of a requirement without ending the checks."""
    try:
        requirement(recipe, folder)
    except UserError as error:
        report.add(error)


def _check_judged_rows(recipe: Recipe, folder: Path, report: CheckReport) -> None:
    """Adds the reasons why the rows that the gate judges by can promote no model, and a note if they are few."""
    if recipe.release.registry is None or not (folder / f"{recipe.judged_split}.arrow").is_file():
        return
    judged = JudgedEntries.of(recipe, folder)
    for message in find_obstacles(recipe, judged.number, expect_comparison(recipe, None), judged.groups):
        problem = Problem(kind="release", where="release.gate", message=message, level="warning")
        report.problems.append(problem.model_dump())
    if few := describe_few_rows(recipe, judged.number):
        report.notes.append(few)


def _check_must_hold(recipe: Recipe, folder: Path) -> None:
    """Reads the rows that the model must have right. Raises UserError."""
    if recipe.release.gate.must_hold is not None:
        settings = load_must_hold_settings(recipe, pin_must_hold(recipe))
        read_must_hold(settings, folder / "rows", folder / "must_hold", lambda done, total: None)


def _check_model(recipe: Recipe, report: CheckReport, terminal: Terminal) -> Lock | None:
    """Checks the model by its configuration. Returns its pinned version, or None if it is not available now."""
    terminal.stage_started("load_model", "")
    lock = None
    try:
        lock = pin_model(recipe)
        report.notes += lock.notes
        checked = require_model(recipe, lock, download=True)
        report.notes += checked.notes
        report.vocab_size = checked.vocab_size
        report.problems += [problem.model_dump() for problem in checked.warnings]
    except MlflowFailed as error:
        report.notes.append(f"The model was not checked. {error}")
    except UserError as error:
        if all(problem.kind == NETWORK for problem in error.problems):
            report.notes.append(f"The model was not checked. {error}")
        else:
            report.add(error)
    return lock


def _count_tokens(recipe: Recipe, lock: Lock | None, folder: Path, report: CheckReport, terminal: Terminal) -> None:
    """Counts tokens if the tokenizer is available. Raises UserError for problems of the tokens."""
    if lock is None:
        report.notes.append("Token lengths were not checked: the model's tokenizer is not available.")
        return
    try:
        tokenizer = find_tokenizer(recipe, lock, folder / "rows", folder / "tokenizer")
    except (UserError, MlflowFailed) as error:
        report.notes.append(f"Token lengths were not checked. {error}")
        return
    exact = has_exact_counts(recipe, tokenizer)
    if recipe.model.start_from == "champion":
        report.notes.append("Tokens were counted by the base model's tokenizer; a champion's may count differently.")
    elif not exact:
        report.notes.append("Tokens were counted by tokenizer.json alone: a run may count some rows differently.")
    progress = terminal.progress_of("tokenize")
    rows, out = folder / "rows", folder / "tokens"
    report.tokens = count_tokens(recipe, tokenizer, rows, out, progress, report.vocab_size)
    report.problems += report.tokens["problems"]
    if exact:
        _require(require_fitting_lengths, recipe, folder / "tokens", report)


def _print(report: CheckReport) -> None:
    """Prints tables, notes and problems: wrapped on a terminal, else one line for each problem."""
    width = terminal_width()
    blocks = []
    if report.rows is not None:
        blocks += [split_lines(report.rows, report.tokens), mixture_lines(report.rows)]
        blocks += [label_lines(report.rows["labels"], width)]
    blocks += [report.notes, problem_lines(report.problems, width if sys.stdout.isatty() else None)]
    for block in filter(None, blocks):
        print("\n".join(block), end="\n\n")
    print(count_line(report.problems))
