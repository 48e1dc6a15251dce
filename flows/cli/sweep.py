"""The command `sweep`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from flows.cli.local_flow import call_in_this_process, print_failure
from flows.cli.shared import (
    COMPLETED,
    add_json_argument,
    add_quiet_argument,
    add_recipe_arguments,
    positive,
    write_json,
)
from flows.reports.result import build_result
from flows.reports.sweep_table import SweepTerminal, tabulate_trials
from flows.reports.tables import align_records, verdict_lines
from flows.reports.terminal import Quiet, Terminal
from tasks.cache.results import Verdict
from tasks.jobs import fork_client
from tasks.jobs.engines.local import early_launches
from tasks.sweeps.trial_state import Trial
from training.problems import UserError
from training.recipe import Recipe, Sweep, load_sweep, parse_set

if TYPE_CHECKING:
    from flows.callers import Caller


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--trials", metavar="N", type=positive, help="the number of trials, instead of sweep.trials")
    add_json_argument(parser, "the sweep's result")
    add_quiet_argument(parser)


def sweep(arguments: argparse.Namespace) -> int:
    """Search the settings of a recipe, and release the best model; or compare variants of it over several seeds.

    The entry of the deployment file has `sweep:` next to `recipe:`. Trials share the data, the tokens and the base
    model. A sweep that was stopped continues with the same command.
    """
    try:
        recipe, sweep = load_sweep(arguments.file, parse_set(arguments.set), arguments.entry, arguments.trials)
    except UserError as error:
        write_json(arguments.json, build_result("failed", [], error=error))
        raise
    table = SweepTerminal(sweep, quiet=arguments.quiet)

    def call(caller: Caller) -> Any:
        from flows.sweep import run_sweep
        from flows.sweep import sweep as flow

        return caller.bind(flow, run_sweep, table=table)(recipe=recipe, sweep=sweep, return_state=True)

    if not arguments.quiet:
        print(f"{recipe.name}: starting a sweep of {sweep.trials} trials", file=sys.stderr)
    with early_launches():
        fork_client.start()
        result = call_in_this_process(call, Quiet() if arguments.quiet else Terminal(recipe=recipe))
    write_json(arguments.json, result)
    code = _print_result(recipe, sweep, result)
    for warning in result["warnings"]:
        print(warning, file=sys.stderr)
    return code


def _print_result(recipe: Recipe, sweep: Sweep, result: dict[str, Any]) -> int:
    """Prints the trials, the best one, its verdict and its version; returns the exit code."""
    trials = [_parse_trial(values) for values in result.get("trials", [])]
    print(*align_records(tabulate_trials(trials, sweep, {})), sep="\n")
    if best := result.get("best"):
        print(f"{best['summary'][:1].upper()}{best['summary'][1:]}")
        if warning := best.get("warning"):
            print(warning)
    if result["state"] != "completed":
        code = print_failure(result)
        print("Trials that have ended are stored: the same command continues from there.", file=sys.stderr)
        return code
    if sweep.variants:
        print(*(gain["summary"] for gain in result["gains"]), sep="\n")
        return COMPLETED
    run = result["run"]
    print(*verdict_lines(Verdict.model_validate(run["verdict"])), sep="\n")
    print(f"Model: {run['model']['path']}")
    if registered := run["model"]["registered"]:
        print(f"Registered: {registered}{', ' + run['model']['alias'] if run['model']['alias'] else ''}")
    return COMPLETED


def _parse_trial(values: dict[str, Any]) -> Trial:
    evaluations = {int(number): value for number, value in values["evaluations"].items()}
    return Trial(**{**values, "evaluations": evaluations})
