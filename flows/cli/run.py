"""The commands that run a recipe: `run`, and `resume` for a run that did not complete."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from flows.cli.local_flow import exit_without_server, fine_tune_here, print_failure, retry_here
from flows.cli.shared import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    add_json_argument,
    add_quiet_argument,
    add_recipe_arguments,
    load_recipe,
    write_json,
)
from flows.plan import build_cached_result, find_unchanged_run, launch_training_early, plan_stages
from flows.reports.result import build_result
from flows.reports.tables import calibration_lines, export_lines, metric_lines, verdict_lines
from flows.reports.terminal import Quiet, Terminal, stage_line
from tasks.cache.planner import Planner
from tasks.cache.results import Verdict
from tasks.jobs import fork_client
from tasks.jobs.engines.local import early_launches
from tasks.registry import untrusted_code
from tasks.reports.model_reports import OUT_OF_FOLD
from tasks.reports.stage_summaries import STAGES, entry_of
from tasks.services.prefect_server import ensure_prefect_server
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.register import format_example_arguments
from tasks.tracking.connection import MlflowFailed
from training.problems import UserError
from training.recipe import Recipe, parse, parse_set


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_json_argument(parser, "the run's result")
    add_quiet_argument(parser)
    parser.add_argument(
        "--force",
        metavar="STAGE",
        nargs="?",
        const="all",
        choices=("all", *STAGES),
        help=f"run this stage although its output is stored: all (the default), {', '.join(STAGES)}",
    )
    parser.add_argument(
        "--require-promotion", action="store_true", help="exit with 1 unless the model is the champion at the end"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a recipe on this machine.

    Stages whose output is stored are not run again. If nothing changed since the last completed run, prints its result.
    """
    out: Path | None = arguments.json
    force = frozenset(STAGES if arguments.force == "all" else [arguments.force] if arguments.force else [])
    try:
        recipe = load_recipe(arguments)
        if arguments.require_promotion and recipe.release.registry is None:
            message = "without release.registry, no model is promoted: set it, or leave the option out."
            raise UserError.of("option", "--require-promotion", message)
        terminal = Quiet() if arguments.quiet else Terminal()
        planner = Planner(recipe.name, force, open_remote(), terminal.fetch_progress_of)
        planned, _ = plan_stages(recipe, planner, before_run=True)
        terminal.close()
    except (UserError, MlflowFailed) as error:
        write_json(out, build_result("failed", [], error=error, where="resolve"))
        raise
    # Only MLflow knows whether the model is the champion now.
    check_again = force or arguments.require_promotion
    last = None if check_again else find_unchanged_run(recipe.name, planner.rows)
    if last is None:
        if not arguments.quiet:
            print(f"{recipe.name}: starting", file=sys.stderr)
        overrides = parse_set(arguments.set)
        with early_launches():
            if any(row.state == "will run" and entry_of(row.name).summarize for row in planner.rows):
                fork_client.start()  # it imports while the Prefect server starts
            launch_training_early(recipe, planner, planned.lock)
            result = fine_tune_here(recipe, overrides=overrides, force=force, quiet=arguments.quiet)
        return _print_result(recipe, result, out, arguments.require_promotion)
    for row in [] if arguments.quiet else planner.rows:
        print(stage_line(row.name, "cached", "", "; ".join(row.reasons)))
    print(f"Nothing changed since flow run {last['flow_run_id']}.")
    for text in metric_lines(last["metrics"]) if arguments.quiet else ():
        print(text)
    result = build_cached_result(recipe, last)
    _print_outcome(recipe, result, "Verdict of that run")
    _print_warnings(result)
    write_json(out, result)
    return COMPLETED


def _print_result(recipe: Recipe, result: dict[str, Any], out: Path | None, require_promotion: bool = False) -> int:
    """Prints the outcome of a run and writes the file of --json; returns the exit code."""
    write_json(out, result)
    if result["state"] == "completed":
        _print_outcome(recipe, result)
        code = COMPLETED
        if require_promotion and result["model"]["alias"] != recipe.release.champion:
            print("Exit code 1: the model was not promoted, and --require-promotion is set.", file=sys.stderr)
            code = FAILED
    else:
        code = print_failure(result)
        hints = {
            FAILED: "Completed stages are stored: the same command continues from there.",
            INTERRUPTED: "Stopped. Run the same command again to continue.",
        }
        if code in hints:
            print(hints[code], file=sys.stderr)
    _print_warnings(result)
    exit_without_server(result, code)
    return code


def _print_outcome(recipe: Recipe, result: dict[str, Any], head: str = "Verdict") -> None:
    """Prints the verdict behind `head`, the model, and the commands that use it."""
    model = result["model"]
    print(*verdict_lines(Verdict.model_validate(result["verdict"]), head), sep="\n")
    print(f"Model: {model['path']}")
    if scores := result.get("out_of_fold"):
        print(*metric_lines({OUT_OF_FOLD.capitalize(): scores}))
    for line in (*calibration_lines(result.get("calibration")), *export_lines(result.get("exports", {}))):
        print(line)
    if model["registered"]:
        name, _, version = model["registered"].partition("/")
        alias, champion = model["alias"], recipe.release.champion
        print(f"Registered: {name} version {version}{f', {alias}' if alias else ''}")
        named = name if alias == champion else f"{name}@{alias}" if alias else f"{name}/{version}"
        task = f" --task {recipe.task}" if ":" in recipe.task else ""
        print(f"Next:\n  finetune predict {named} {format_example_arguments(recipe)}")
        print(f"  finetune serve   {named}{task}")
        if alias != champion:
            print(f"  finetune promote {name} {version}    # makes it the {champion}")
    elif recipe.release.registry is None:
        print("Register it: set release.registry in the recipe.")
    if model.get("published"):
        print(f"Published: {model['published']}")


def _print_warnings(result: dict[str, Any]) -> None:
    for warning in result["warnings"]:
        print(warning, file=sys.stderr)


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a flow run's id, its first digits, or its name (default: the last)",
    )
    add_json_argument(parser, "the run's result")
    add_quiet_argument(parser)
    parser.add_argument(untrusted_code.OPTION, action="store_true", help=untrusted_code.OPTION_HELP)


def resume(arguments: argparse.Namespace) -> int:
    """Continue a run that did not complete.

    Completed stages stay cached, training continues from its newest checkpoint in the same MLflow run, and names of
    data and models stay pinned to their versions at the start of the run.
    """
    from tasks.prefect.flow_runs import can_resume, find, flow_name, schedule

    url = ensure_prefect_server()
    run = find(arguments.run)
    if run.deployment_id is not None:
        schedule(run)
        page = f"{url.removesuffix('/api')}/runs/flow-run/{run.id}"
        print(f"{run.name} ({run.id}): a worker continues it. {page}")
        return COMPLETED
    if not can_resume(run, flow_name(run)):
        raise UserError.of(
            "option", "RUN", f"{run.id} is a sweep, or a part of one: the same `finetune sweep` continues it."
        )
    parameters = run.parameters
    values, overrides = parameters["recipe"], parameters.get("overrides")
    if not arguments.run_code:
        untrusted_code.require_consent("the Prefect server", values, overrides=overrides, run=str(run.id))
    recipe = parse(values, overrides)
    # Run exactly the parameters that were checked, even if the server returns others by now.
    run = schedule(run).model_copy(update={"parameters": parameters})
    if not arguments.quiet:
        print(f"{recipe.name}: continuing {run.id}", file=sys.stderr)
    return _print_result(recipe, retry_here(recipe, run, arguments.quiet), arguments.json)
