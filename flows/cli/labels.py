"""The command `labels`: training rows whose labels are probably wrong."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from flows.cli.local_flow import call_in_this_process, print_failure
from flows.cli.shared import COMPLETED, add_json_argument, name_options, write_json
from flows.reports.tables import align_records, fit_to_terminal, terminal_width, wrap
from flows.reports.terminal import Terminal
from tasks.reports.label_reports import describe_suspects, tabulate_suspects

SHOWN = 10


def add_labels_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="a recipe, for its last run; or a registered version, NAME/VERSION or NAME@ALIAS"
    )
    parser.add_argument("--out", metavar="FILE", default="", help="the file to decide in (default: RECIPE-labels.csv)")
    parser.add_argument(
        "--against",
        metavar="PATH",
        default="",
        help="files with labels of another source for the same rows, read as the recipe reads its own",
    )
    parser.add_argument(
        "--against-label", metavar="COLUMN", default="", help="their column of labels (default: as ours)"
    )
    add_json_argument(parser, "the result with the report")


def labels(arguments: argparse.Namespace) -> int:
    """List training rows whose labels are probably wrong, and write a file to decide about them.

    The recipe needs `evaluation.folds`: only a model that has not seen a row can doubt its label.
    """

    def call(caller: Any) -> Any:
        from flows.labels import labels, run_labels

        other = (arguments.against, arguments.against_label)
        return caller.bind(labels, run_labels)(arguments.name, arguments.out, *other, return_state=True)

    result = call_in_this_process(call, Terminal())
    result |= {"problems": name_options(result["problems"], {"out": "--out", "against": "--against"})}
    write_json(arguments.json, result)
    for warning in result["warnings"]:
        print(warning, file=sys.stderr)
    if result["state"] != "completed":
        return print_failure(result)
    report = result["labels"]
    for line in describe_suspects(report):
        print(*wrap(line, terminal_width(), "", "  "), sep="\n")
    if table := tabulate_suspects(report["first"])[:SHOWN]:
        print(*fit_to_terminal(align_records(table)), sep="\n")
    print(f"To decide: write a label, drop or keep into the column decision of {report['file']},")
    print(f"and set data.corrections: {report['file']}")
    return COMPLETED
