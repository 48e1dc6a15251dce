"""`finetune predict NAME[@ALIAS] TEXT…`: asks a registered model, of texts or of a file of rows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import unwritable
from flows.cli.codes import COMPLETED, sigterm_interrupts
from flows.reports.lines import Terminal
from tasks.tracking.reports import format_count
from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from tasks.registry.prediction_job import ModelSpec


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("predict", help="ask a registered model", description=__doc__)
    parser.add_argument(
        "model", metavar="NAME[@ALIAS|/VERSION]", help="a registered model; its champion where no version is named"
    )
    parser.add_argument(
        "texts",
        metavar="TEXT",
        nargs="*",
        help="what it is asked; several a row where it takes several",
    )
    parser.add_argument(
        "--task",
        metavar="MODULE:CLASS",
        default="",
        help="of a model of a task type of yours, that class: its code is run",
    )
    parser.add_argument(
        "--file",
        metavar="IN",
        type=Path,
        help="rows with the columns that the model is shown: .txt (a text a line), .csv, .tsv, .jsonl, .parquet",
    )
    parser.add_argument(
        "--out", metavar="OUT", type=Path, help="the same rows with its answers: .csv, .tsv, .jsonl or .parquet"
    )
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints labels and probabilities, the likeliest first, or writes them to a file with the rows.

    Raises UserError for a model that is not there, and for rows that it cannot be asked about.
    """
    from tasks.registry.prediction_job import READ, WRITTEN, find_model, predict_file

    problems = list(_problems(arguments, READ, WRITTEN))
    if problems:
        raise UserError(problems)
    name, alias, version = _named(arguments.model)
    with sigterm_interrupts():
        model = find_model(name, alias, version, arguments.task)
        if arguments.file is None:
            return _print_answers(model, arguments.texts)
        terminal = Terminal()
        terminal.stage_started("predict", "")
        written = predict_file(
            model,
            arguments.file.absolute(),
            arguments.out.absolute(),
            lambda events: terminal.stage_events("predict", events),
        )
        terminal.clear()
    print(f"{format_count(written['rows'], 'row')}: {arguments.out}")
    if written["unanswered"]:
        print(f"Without an answer, for want of what is asked about: {format_count(written['unanswered'], 'row')}.")
    return COMPLETED


def _named(model: str) -> tuple[str, str, str]:
    """The name, and the alias or the version behind it."""
    name, at, alias = model.partition("@")
    if not at:
        name, _, version = model.partition("/")
        return name, "", version
    return name, alias, ""


def _problems(arguments: argparse.Namespace, read: Sequence[str], written: Sequence[str]) -> Any:
    """Problems of the arguments that can be found without the model."""
    file, out = arguments.file, arguments.out

    def problem(where: str, message: str) -> Problem:
        return Problem(kind="option", where=where, message=message)

    if not arguments.texts and file is None:
        yield problem("TEXT", "there is nothing to ask: give texts, or --file IN --out OUT.")
    if arguments.texts and file is not None:
        yield problem("--file", "is given beside texts: give one of them.")
    if (file is None) != (out is None):
        yield problem("--out" if out is None else "--file", "is missing: --file IN and --out OUT go together.")
    for where, path, formats in (("--file", file, read), ("--out", out, written)):
        if path is not None and not path.name.endswith(tuple(formats)):
            yield problem(
                where, f"{path} is of no known format: choose from {', '.join(formats)}.{nearest(path.suffix, formats)}"
            )
    if file is not None and not file.is_file():
        yield problem("--file", f"{file} is no file.")
    if out is not None and (message := unwritable(out)):
        yield problem("--out", message)


def _print_answers(model: ModelSpec, given: Sequence[str]) -> int:
    from tasks.registry.prediction_job import predict_values, split_into_rows

    rows = split_into_rows(model, given)
    for row, lines in zip(rows, predict_values(model, rows), strict=True):
        print(*row, *(f"  {line}" for line in lines), sep="\n")
    return COMPLETED
