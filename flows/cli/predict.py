"""The command `predict`: for texts, or for the rows of files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flows.batch_plan import prepare
from flows.cli.local_flow import call_in_this_process, print_failure
from flows.cli.shared import (
    COMPLETED,
    INTERRUPTED,
    add_json_argument,
    add_reading_argument,
    add_version_arguments,
    name_options,
    parse_reading,
    write_json,
)
from flows.reports.batch_prediction_report import build_result, count, describe, describe_errors
from flows.reports.terminal import Terminal
from tasks.prediction.input_rows import require_few_errors
from tasks.prediction.shard_job import last_rate
from tasks.prediction.single_rows import predict_values, split_into_rows
from tasks.registry.model_spec import find_model, with_prompt
from tasks.reports.formatting import format_count
from tasks.shared_store.bucket_remote import open_remote
from training.problems import Problem, UserError, renamed
from training.recipe import BatchPrediction, parse_batch_prediction, split_version_name

if TYPE_CHECKING:
    from flows.callers import Caller

OF_FILES = {
    "data": "--set",
    "keep": "--keep",
    "id": "--id",
    "escape_formulas": "--escape-formulas",
    "embedding_type": "--embedding-type",
    "max_error_rate": "--max-error-rate",
    "format": "--format",
    "batch_size": "--batch-size",
    "shard_rows": "--shard-rows",
    "processes": "--processes",
    "cluster": "--cluster",
    "cluster_address": "--cluster-address",
    "drift": "--no-drift",
}
"""The options for files that are optional, by the field of the parameters."""
OPTIONS = {
    "model": "NAME",
    "input": "--input",
    "output": "--output",
    "task": "--task",
    "prompt": "--prompt",
    **OF_FILES,
}


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    add_version_arguments(parser)
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="the input; one argument for each column that the model reads"
    )
    files = "files, folders, globs or URLs of rows with the columns that the model reads, in the formats of training "
    parser.add_argument(
        "--input",
        metavar="PATH",
        nargs="+",
        action="extend",
        help=f"{files}data, or .txt (a text a line; after training on folders of texts, one text); repeatable",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="write the predictions to this folder or URL; or to one file, .parquet, .csv, .tsv or .jsonl",
    )
    add_reading_argument(parser)
    parser.add_argument(
        "--format",
        choices=("parquet", "csv", "jsonl", "openai"),
        help="of the files in a folder (default: parquet); openai: the output of OpenAI's batch files",
    )
    parser.add_argument(
        "--keep",
        metavar="COLUMNS",
        action="extend",
        type=lambda text: [name for name in text.split(",") if name],
        help="columns of the input that travel along, such as id,text (default: those that the model reads)",
    )
    parser.add_argument("--id", metavar="COLUMN", help="a column that must have another value in each row")
    parser.add_argument(
        "--max-error-rate",
        metavar="SHARE",
        type=float,
        help="the share of rows that may be unusable (default: 0.1); more of them end the run before it predicts",
    )
    parser.add_argument(
        "--escape-formulas",
        action="store_const",
        const=True,
        help="begin cells of CSV that a spreadsheet would run as a formula with an apostrophe",
    )
    parser.add_argument(
        "--prompt",
        metavar="COLUMN",
        help="of embeddings: the column of the training data whose prompt is put before texts, such as positive",
    )
    parser.add_argument(
        "--embedding-type",
        choices=("float32", "float16", "binary"),
        help="the numbers of embeddings in Parquet (default: float32); binary: a bit a dimension",
    )
    parser.add_argument("--batch-size", metavar="ROWS", type=int, help="rows in one forward pass (default: 64)")
    parser.add_argument("--shard-rows", metavar="ROWS", type=int, help="rows that are predicted and stored as a whole")
    parser.add_argument(
        "--processes", metavar="N", type=int, help="programs that predict at once (default: one for each GPU, or one)"
    )
    parser.add_argument("--cluster", choices=("ray",), help="where these programs run (default: on this machine)")
    parser.add_argument(
        "--cluster-address", metavar="HOST:PORT", help="of the cluster (default: RAY_ADDRESS, or one of this machine)"
    )
    parser.add_argument(
        "--no-drift",
        dest="drift",
        action="store_const",
        const=False,
        help="do not compare the new rows with the version's validation rows",
    )
    parser.add_argument(
        "--plan", action="store_true", help="show how many rows are new and about how long they take; predict nothing"
    )
    add_json_argument(parser, "the result")


def predict(arguments: argparse.Namespace) -> int:
    """Predict with a registered model: for texts, or for the rows of files.

    Rows that were predicted before, by the same model, are not predicted again.
    """
    if problems := [*_find_problems(arguments)]:
        raise UserError(problems)
    if not arguments.input:
        return _predict_texts(arguments)
    with renamed(OPTIONS):
        prediction = _parse(arguments)
        return _plan(prediction, arguments) if arguments.plan else _predict_files(prediction, arguments)


def _predict_texts(arguments: argparse.Namespace) -> int:
    with renamed(OPTIONS):
        model = with_prompt(find_model(*split_version_name(arguments.model), arguments.task), arguments.prompt)
    rows = split_into_rows(model, arguments.texts)
    for row, lines in zip(rows, predict_values(model, rows), strict=True):
        print(*row, *(f"  {line}" for line in lines), sep="\n")
    return COMPLETED


def _parse(arguments: argparse.Namespace) -> BatchPrediction:
    """The parameters of the flow. Raises UserError."""
    values = {name: getattr(arguments, name) for name in OPTIONS if name != "data"}
    values |= {"task": values["task"] or None, "data": parse_reading(arguments.set)}
    return parse_batch_prediction({name: value for name, value in values.items() if value is not None})


def _plan(prediction: BatchPrediction, arguments: argparse.Namespace) -> int:
    remote, terminal = open_remote(), Terminal()
    terminal.stage_started("predict", "")
    prepared = prepare(prediction.model_copy(update={"drift": False}), remote, terminal)
    terminal.close()
    require_few_errors(prepared.scan, prediction.max_error_rate)
    counts, rate = count(prepared), last_rate(prepared.model)
    seconds = counts["new"] / rate if rate else None
    lasts = "the time is unknown before the first run"
    if rate and seconds is not None:
        lasts = f"about {format_duration(seconds)} at {rate:,.0f} rows/s, the last rate"
    version = f"{counts['model']} version {counts['version']}"
    print(f"{format_count(counts['rows'], 'row')} in {format_count(counts['files'], 'file')}; {version} would predict "
          f"{counts['new']:,} of them{f' ({lasts})' if counts['new'] else ''}.")  # fmt: skip
    for line in describe_errors(counts["errors"]):
        print(line)
    for warning in [*prepared.scan.warnings(), *remote.end_run(wait=False)]:
        print(warning, file=sys.stderr)
    write_json(arguments.json, {"counts": counts, "seconds": seconds})
    return COMPLETED


def format_duration(seconds: float) -> str:
    """`40 s`, `12 min` or `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _predict_files(prediction: BatchPrediction, arguments: argparse.Namespace) -> int:
    terminal, began_s = Terminal(), time.time()

    def run(caller: Caller) -> Any:
        from flows.batch_predict import batch_predict, run_batch_prediction

        return caller.bind(batch_predict, run_batch_prediction)(prediction=prediction, return_state=True)

    def fail(state: str, error: BaseException, where: str) -> dict[str, Any]:
        return build_result(None, None, began_s, error)

    result = call_in_this_process(run, terminal, build_failure=fail)
    result["problems"] = name_options(result["problems"], OPTIONS)
    write_json(arguments.json, result)
    if result["state"] == "completed":
        print(*describe(result), sep="\n")
        code = COMPLETED
    else:
        code = print_failure(result)
        if code == INTERRUPTED:
            print("Stopped. Run the same command again to continue.", file=sys.stderr)
    for warning in result["warnings"]:
        print(warning, file=sys.stderr)
    return code


def _find_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Finds the problems of the arguments that need no model."""

    def problem(where: str, message: str) -> Problem:
        return Problem(kind="option", where=where, message=message)

    texts, of_files = arguments.texts, arguments.input or arguments.output
    if not texts and not of_files:
        yield problem("TEXT", "there is no input: give texts, or --input PATH… --output PATH.")
    if any(not text.isascii() and text.encode(errors="replace").decode() != text for text in texts):
        yield problem("TEXT", "is not UTF-8 text: set a terminal of UTF-8, or give the texts in a file.")
    if texts and of_files:
        yield problem("TEXT", f"{texts[0]!r:.60} cannot be combined with --input and --output: give one of them.")
    if of_files and not (arguments.input and arguments.output):
        missing = "--output" if arguments.input else "--input"
        yield problem(missing, "is missing: --input PATH… and --output PATH go together.")
    given = vars(arguments) | {"data": arguments.set or None}
    for name in OF_FILES:
        if texts and given[name] is not None:
            yield problem(OF_FILES[name], "is for files: leave it out, or give --input and --output.")
