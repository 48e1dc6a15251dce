"""The commands for models in use: `drift` compares new rows, `evaluate` scores rows with labels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.local_flow import call_in_this_process, print_failure
from flows.cli.shared import (
    COMPLETED,
    add_json_argument,
    add_reading_argument,
    add_version_arguments,
    name_options,
    parse_reading,
    write_json,
)
from flows.reports.tables import align_records, terminal_width, wrap
from flows.reports.terminal import Terminal
from tasks.registry.untrusted_code import OPTION, OPTION_HELP
from tasks.reports.model_reports import (
    describe_accuracy,
    describe_evaluation,
    describe_words,
    summarize_drift,
    tabulate_drift,
    tabulate_evaluation,
)
from training.problems import UserError

if TYPE_CHECKING:
    from flows.callers import Caller


def add_drift_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser, "new rows")
    add_reading_argument(parser, "; or override one of its release.drift, such as auc=0.6")
    add_json_argument(parser, "the result with the whole report")


def _add_model_arguments(parser: argparse.ArgumentParser, rows: str) -> None:
    add_version_arguments(parser)
    parser.add_argument(
        "--input",
        metavar="PATH",
        nargs="+",
        action="extend",
        required=True,
        help=f"files, folders, globs or URLs of the {rows}; repeatable",
    )


def drift(arguments: argparse.Namespace) -> int:
    """Compare new rows with the validation rows of a registered model.

    The verdict is steady, watch or drifted. A difference counts only if it is significant and above its threshold
    (release.drift in the recipe).
    """
    about_rows = [word for word in arguments.set if word.startswith("data.")]
    thresholds = _parse_thresholds([word for word in arguments.set if word not in about_rows])
    data = parse_reading(about_rows)

    def call(caller: Caller) -> Any:
        from flows.drift import drift, run_drift

        bound, task = caller.bind(drift, run_drift), arguments.task
        return bound(arguments.model, arguments.input, thresholds, task, data, return_state=True)

    result = _call_flow(call, arguments.json)
    if result["state"] != "completed":
        return print_failure(result)
    for line in _report_lines(result["drift"], result["version"], terminal_width()):
        print(line)
    return COMPLETED


def _parse_thresholds(words: Sequence[str]) -> dict[str, int | float]:
    """Parses the values of --set. Raises UserError."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = float(value) if not value.isdecimal() else int(value)
        except ValueError as error:
            raise UserError.of("option", "--set", f"{word!r} is not FIELD=NUMBER, such as auc=0.6.") from error
    return found


def _report_lines(report: Mapping[str, Any], version: str, width: int) -> Iterator[str]:
    """The lines of a report: the verdict, the comparisons, and the estimated accuracy."""
    yield f"Verdict: {report['verdict']}"
    yield from wrap(f"{version}, {summarize_drift(report)}", width, "  ", "  ")
    yield from (f"  {line}" for line in align_records(tabulate_drift(report)))
    for text in (describe_words(report), describe_accuracy(report)):
        if text:
            yield from wrap(text, width, "  ", "  ")


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser, "rows and their labels")
    parser.add_argument(OPTION, action="store_true", help=OPTION_HELP)
    add_reading_argument(parser)
    add_json_argument(parser, "the result with all metrics")


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate a registered model on rows with labels, next to its metrics at registration.

    The metrics are kept with the version: `finetune show NAME/VERSION` lists them.
    """
    data = parse_reading(arguments.set)

    def call(caller: Caller) -> Any:
        from flows.evaluate import evaluate, run_evaluation

        bound, task = caller.bind(evaluate, run_evaluation), arguments.task
        return bound(arguments.model, arguments.input, task, arguments.run_code, data, return_state=True)

    result = _call_flow(call, arguments.json)
    if result["state"] != "completed":
        return print_failure(result)
    evaluation = result["evaluation"]
    for line in describe_evaluation(evaluation):
        print(*wrap(line, terminal_width(), "", "  "), sep="\n")
    print(*(f"  {line}" for line in align_records(tabulate_evaluation(evaluation))), sep="\n")
    name = result["version"].partition("/")[0]
    print(f"To return to the previous champion: finetune rollback {name}")
    print(f"To train on newer rows:             prefect deployment run retrain/{evaluation['recipe']}")
    return COMPLETED


def _call_flow(call: Callable[[Caller], Any], out: Path | None) -> dict[str, Any]:
    """Returns the result of a flow, whose problems have the names of the command's options. Writes it to the file of
    --json, and prints its warnings."""
    result = call_in_this_process(call, Terminal())
    result |= {"problems": name_options(result["problems"], {"inputs": "--input", "thresholds.": "--set "})}
    write_json(out, result)
    for warning in result["warnings"]:
        print(warning, file=sys.stderr)
    return result
