"""Evaluate a registered model on rows with labels, next to the figures of its registration.

The figures are kept with the version: `finetune show NAME/VERSION` lists them.
"""

from __future__ import annotations

import argparse

from flows.cli.drift import add_model_arguments
from flows.cli.local_flow import call_model_flow, exit_without_server, print_failure
from flows.cli.shared import COMPLETED, add_json_argument, add_reading_argument, parse_reading, write_json
from flows.reports.tables import align, terminal_width, wrap
from tasks.registry.untrusted_code import OPTION, OPTION_HELP
from tasks.reports.model_reports import describe_evaluation, tabulate_evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, "rows and their labels")
    parser.add_argument(OPTION, action="store_true", help=OPTION_HELP)
    add_reading_argument(parser)
    add_json_argument(parser, "the result with all figures")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the figures and the commands that may follow; returns 0 also for figures outside of the gate's bounds."""
    result = call_model_flow(
        "evaluate",
        model=arguments.model,
        inputs=arguments.input,
        task=arguments.task,
        run_code=arguments.run_code,
        data=parse_reading(arguments.set),
    )
    write_json(arguments.json, result)
    if result["state"] != "completed":
        return print_failure(result)
    evaluation = result["evaluation"]
    for line in describe_evaluation(evaluation):
        print(*wrap(line, terminal_width(), "", "  "), sep="\n")
    table = tabulate_evaluation(evaluation)
    print(*(f"  {line}" for line in align([list(table[0]), *(list(row.values()) for row in table)])), sep="\n")
    name = result["version"].partition("/")[0]
    print(f"To return to the previous champion: finetune rollback {name}")
    print(f"To train on newer rows:             prefect deployment run retrain/{evaluation['recipe']}")
    exit_without_server(result, COMPLETED)
    return COMPLETED
