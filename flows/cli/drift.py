"""Compare new rows with the validation rows of a registered model.

The verdict is steady, watch or drifted. A difference counts only if it is significant and above its threshold
(release.drift in the recipe).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flows.cli.local_flow import call_model_flow, exit_without_server, print_failure
from flows.cli.shared import (
    COMPLETED,
    add_json_argument,
    add_reading_argument,
    add_version_arguments,
    parse_reading,
    write_json,
)
from flows.reports.tables import align, terminal_width, wrap
from tasks.reports.model_reports import describe_accuracy, describe_words, summarize_drift, tabulate_drift
from training.problems import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, "new rows")
    add_reading_argument(parser, "; or override one of its release.drift, such as auc=0.6")
    add_json_argument(parser, "the result with the whole report")


def add_model_arguments(parser: argparse.ArgumentParser, rows: str) -> None:
    """Adds NAME, --input and --task."""
    add_version_arguments(parser)
    parser.add_argument(
        "--input",
        metavar="PATH",
        nargs="+",
        action="extend",
        required=True,
        help=f"files, folders, globs or URLs of the {rows}; repeatable",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 0 for every verdict. Raises UserError for mistakes in the options."""
    about_rows = [word for word in arguments.set if word.startswith("data.")]
    thresholds = parse_thresholds([word for word in arguments.set if word not in about_rows])
    data = parse_reading(about_rows)
    result = call_model_flow(
        "drift", model=arguments.model, inputs=arguments.input, thresholds=thresholds, task=arguments.task, data=data
    )
    write_json(arguments.json, result)
    for warning in result["warnings"]:
        print(warning, file=sys.stderr)
    if result["state"] != "completed":
        return print_failure(result)
    for line in report_lines(result["drift"], result["version"], terminal_width()):
        print(line)
    exit_without_server(result, COMPLETED)
    return COMPLETED


def parse_thresholds(words: Sequence[str]) -> dict[str, int | float]:
    """Parses the values of --set. Raises UserError."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = float(value) if not value.isdecimal() else int(value)
        except ValueError as error:
            raise UserError.of("option", "--set", f"{word!r} is not FIELD=NUMBER, such as auc=0.6.") from error
    return found


def report_lines(report: Mapping[str, Any], version: str, width: int) -> Iterator[str]:
    """The lines of a report: the verdict, the comparisons, and the estimated accuracy."""
    yield f"Verdict: {report['verdict']}"
    yield from wrap(f"{version}, {summarize_drift(report)}", width, "  ", "  ")
    if table := tabulate_drift(report):
        yield from (f"  {line}" for line in align([list(table[0]), *(list(row.values()) for row in table)]))
    for text in (describe_words(report), describe_accuracy(report)):
        if text:
            yield from wrap(text, width, "  ", "  ")
