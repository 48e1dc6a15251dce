"""Predict with a registered model: for texts, or for the rows of a file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.cli.shared import COMPLETED, output_file
from flows.reports.terminal import Terminal
from tasks.tracking.reports import format_count
from training.problems import Problem, UserError, nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="NAME[@ALIAS|/VERSION]",
        help="a registered model; without alias and version, its champion",
    )
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="the input; one argument for each column that the model reads"
    )
    parser.add_argument(
        "--task",
        metavar="MODULE:CLASS",
        default="",
        help="the class of the model's task type if it is your own; its code is run",
    )
    parser.add_argument(
        "--file",
        metavar="IN",
        type=Path,
        help="rows with the columns that the model reads: .txt (a text a line) or a file format of training data",
    )
    parser.add_argument(
        "--out",
        metavar="OUT",
        type=output_file,
        help="write the rows with their predictions to this file: .csv, .tsv, .jsonl or .parquet",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prints the predictions of texts, the likeliest label first, or writes those of a file.

    Raises UserError for an unknown model and for rows that it cannot read.
    """
    from tasks.registry.prediction_job import (
        READ,
        WRITTEN,
        find_model,
        predict_file,
        predict_values,
        split_into_rows,
    )

    if problems := [*_find_problems(arguments, READ, WRITTEN)]:
        raise UserError(problems)
    name, at, alias = arguments.model.partition("@")
    name, _, version = (name, "", "") if at else name.partition("/")
    model = find_model(name, alias, version, arguments.task)
    if arguments.file is None:
        rows = split_into_rows(model, arguments.texts)
        for row, lines in zip(rows, predict_values(model, rows), strict=True):
            print(*row, *(f"  {line}" for line in lines), sep="\n")
        return COMPLETED
    terminal = Terminal()
    terminal.stage_started("predict", "")
    counts = predict_file(
        model, arguments.file.absolute(), arguments.out, lambda events: terminal.stage_events("predict", events)
    )
    terminal.clear()
    print(f"{format_count(counts['rows'], 'row')}: {arguments.out}")
    if counts["without_prediction"]:
        print(f"Without a prediction, because a column is empty: {format_count(counts['without_prediction'], 'row')}.")
    return COMPLETED


def _find_problems(
    arguments: argparse.Namespace, readable: Sequence[str], writable: Sequence[str]
) -> Iterator[Problem]:
    """Finds the problems of the arguments that need no model."""
    file, out = arguments.file, arguments.out

    def problem(where: str, message: str) -> Problem:
        return Problem(kind="option", where=where, message=message)

    if not arguments.texts and file is None:
        yield problem("TEXT", "there is no input: give texts, or --file IN --out OUT.")
    if any(not text.isascii() and text.encode(errors="replace").decode() != text for text in arguments.texts):
        yield problem("TEXT", "is not UTF-8 text: set a terminal of UTF-8, or give the texts in a file.")
    if arguments.texts and file is not None:
        yield problem("--file", "cannot be combined with texts: give one of them.")
    if (file is None) != (out is None):
        yield problem("--out" if out is None else "--file", "is missing: --file IN and --out OUT go together.")
    for where, path, formats in (("--file", file, readable), ("--out", out, writable)):
        if path is not None and not path.name.endswith(tuple(formats)):
            hint = nearest(path.suffix, formats)
            yield problem(where, f"{path} has an unknown format: choose from {', '.join(formats)}.{hint}")
    if file is not None and not file.is_file():
        yield problem("--file", f"{file} is not a file.")
