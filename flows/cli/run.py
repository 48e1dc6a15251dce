"""`finetune run FILE`: runs a recipe here, or says that nothing changed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.changes import cached_result, nothing_changed
from flows.cli.arguments import (
    add_json_argument,
    add_quiet_argument,
    add_recipe_arguments,
    chosen_recipe,
    need_writable,
)
from flows.cli.codes import COMPLETED, FAILED, INTERRUPTED, code_of, interrupt
from flows.planned import planned
from flows.reports.lines import Quiet, Terminal, draws, line
from flows.reports.result import problems
from flows.reports.tables import metric_lines, problem_line, verdict_lines
from tasks.cache import settings
from tasks.cache.planner import Planner
from tasks.cache.refs import Verdict
from tasks.cache.stage import Listener
from tasks.jobs.launch import Machines
from tasks.jobs.machines import Helper, find_machines
from tasks.tracking.connection import MlflowFailed
from tasks.tracking.stage_table import STAGES
from training.jobs.protocol import write_atomically
from training.problems import Problem, UserError, full_disk, nearest
from training.recipe import Recipe, parse_set

if TYPE_CHECKING:
    from prefect import Flow, State
    from prefect.client.schemas.objects import FlowRun


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("run", help="run a recipe on this machine", description=__doc__)
    add_recipe_arguments(parser)
    add_json_argument(parser, "the run's result")
    add_quiet_argument(parser)
    parser.add_argument(
        "--force",
        metavar="STAGE",
        nargs="?",
        const="all",
        help=f"run a stage although its output is stored: all, or one of {', '.join(STAGES)}",
    )
    parser.add_argument(
        "--require-promotion", action="store_true", help="exit with 1 unless the model is the champion at the end"
    )
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Runs it. Raises UserError for mistakes in the file, the options and the names in the recipe, MlflowFailed where
    the champion that training starts from cannot be asked for."""
    out: Path | None = arguments.json
    need_writable(out)
    try:
        force = _forced(arguments.force)
        recipe = chosen_recipe(arguments)
        if arguments.require_promotion and recipe.release.registry is None:
            message = "without release.registry nothing is promoted: set it, or leave the option out."
            raise UserError([Problem(kind="option", where="--require-promotion", message=message)])
        machines = find_machines(recipe.compute)
        helper = Helper(machines) if machines.rank else None
        planner = Planner(recipe.name, force)
        planned(recipe, planner, runs=True)
        # Whether it is promoted now, MLflow alone knows.
        done = None if force or arguments.require_promotion else nothing_changed(recipe.name, planner.rows)
    except (UserError, MlflowFailed) as error:
        _write(out, {**_EMPTY, "state": "failed", "problems": problems(error, "resolve")})
        raise
    if done is None and helper is not None:
        return _help(recipe, machines, helper, out)
    if done is None:
        return _run(recipe, arguments, force)
    for row in [] if arguments.quiet else planner.rows:
        print(line(row.name, "cached", "", "; ".join(row.reasons)))
    print(f"Nothing changed since flow run {done['flow_run_id']}.")
    for shown in metric_lines(done["metrics"]) if arguments.quiet else ():
        print(shown)
    _say_next(recipe, done, require_promotion=False)
    done = cached_result(done)
    for warning in done["warnings"]:
        print(warning, file=sys.stderr)
    _write(out, done)
    return COMPLETED


_EMPTY: dict[str, Any] = {
    "state": "failed",
    "flow_run_id": None,
    "mlflow_run_id": None,
    "stages": [],
    "metrics": {},
    "verdict": None,
    "model": None,
    "problems": [],
    "warnings": [],
}


def _forced(stage: str | None) -> frozenset[str]:
    if stage is None:
        return frozenset()
    if stage != "all" and stage not in STAGES:
        message = f"{stage!r} is no stage: choose from all, {', '.join(STAGES)}.{nearest(stage, STAGES)}"
        raise UserError([Problem(kind="option", where="--force", message=message)])
    return frozenset(STAGES if stage == "all" else [stage])


def _run(recipe: Recipe, arguments: argparse.Namespace, force: frozenset[str]) -> int:
    if not arguments.quiet:
        print(f"{recipe.name}: starting", file=sys.stderr)
    # They are in the recipe already; the flow run tells of them all the same, in its parameters and its name.
    overrides = parse_set(arguments.set)
    call = partial(call_flow, recipe, force, overrides=overrides, quiet=arguments.quiet)
    return _ended(recipe, arguments.json, arguments.require_promotion, call)


def go_on(recipe: Recipe, flow_run: FlowRun, out: Path | None, quiet: bool) -> int:
    """Tries a flow run again in this process, and tells how it ended; gives the exit code."""
    return _ended(recipe, out, False, partial(call_flow, recipe, frozenset(), flow_run=flow_run, quiet=quiet))


def _ended(recipe: Recipe, out: Path | None, require_promotion: bool, call: Callable[[], dict[str, Any]]) -> int:
    signal.signal(signal.SIGTERM, interrupt)
    done = call()
    _write(out, done)
    code = _say(recipe, done, require_promotion)
    for warning in done["warnings"]:
        print(warning, file=sys.stderr)
    leave(done, code)
    return code


def leave(done: dict[str, Any], code: int) -> None:
    """Ends this process at once where Prefect would try for minutes to send its last log lines to a server that is
    away; else does nothing."""
    from tasks.prefect import pending_states

    if done["flow_run_id"] and pending_states.is_pending(done["flow_run_id"]):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _quiet() -> None:
    # The table tells what happens here; Prefect's own lines go to its server and its UI.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    # Nor does it tell here, line for line, that the server is away.
    os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")
    logging.raiseExceptions = False


def _help(recipe: Recipe, machines: Machines, helper: Helper, out: Path | None) -> int:
    """Trains with machine 0, which has the result."""
    signal.signal(signal.SIGTERM, interrupt)
    name = f"{recipe.name}, machine {machines.rank} of {machines.count}"
    print(f"{name}: waiting for machine 0", file=sys.stderr)
    try:
        end = helper.help(recipe.compute.stall_timeout_s, lambda text: print(f"{name}: {text}", file=sys.stderr))
        state, message = end.ended or "failed", end.message
    except KeyboardInterrupt:
        state, message = "interrupted", "stopped here; run the same command again to help on."
    problems = [] if state == "completed" else [{"kind": state, "where": name, "message": message}]
    _write(out, {**_EMPTY, "state": state, "problems": problems})
    if state == "completed":
        print(f"{name}: trained. The model is machine 0's: {message}")
    else:
        print(f"{name}: {state}: {message}", file=sys.stderr)
    return {"completed": COMPLETED, "interrupted": INTERRUPTED}.get(state, FAILED)


def _say(recipe: Recipe, done: dict[str, Any], require_promotion: bool) -> int:
    """Tells how the run ended, and what to do next; gives the exit code."""
    if done["state"] == "completed":
        return _say_next(recipe, done, require_promotion)
    code = say_failed(done)
    if code == FAILED:
        print("What finished is kept: the same command goes on from there.", file=sys.stderr)
    if code == INTERRUPTED:
        print("Stopped. Run the same command again: it goes on where it stopped.", file=sys.stderr)
    return code


def say_failed(done: dict[str, Any]) -> int:
    """Tells why a run did not complete; gives the exit code."""
    if done["state"] == "interrupted":
        return INTERRUPTED
    for problem in done["problems"]:
        print(problem_line(problem), file=sys.stderr)
    return code_of(problem["kind"] for problem in done["problems"] if problem.get("level") != "warning")


def call_flow(
    recipe: Recipe,
    force: frozenset[str],
    *more_listeners: Listener,
    overrides: dict[str, Any] | None = None,
    flow_run: FlowRun | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """The flow's result as JSON values, however it ended; the terminal and the given listeners follow it.

    A given flow run is run again with its own parameters. The overrides go to Prefect; the recipe has them already.
    """
    _quiet()
    from tasks.prefect.ephemeral_server import ensure_prefect_server

    terminal, where = _terminal(recipe, quiet), "prefect"
    try:
        ensure_prefect_server()
        from flows.finetune import finetune, listeners
        from flows.retrain import retrain
        from tasks.prefect import pending_states
        from tasks.prefect.flow_runs import flow_name

        pending_states.deliver()
        listeners.set((terminal, *more_listeners))
        if flow_run is None:
            ended = finetune(recipe=recipe, overrides=overrides or None, force=sorted(force), return_state=True)
        else:
            ended = _again({one.name: one for one in (finetune, retrain)}[flow_name(flow_run)], flow_run)
        if terminal.result is None:
            where = "run"
            ended.result()  # raises what ended the flow before or after its stages
    except BaseException as error:  # in the result already if the flow itself began
        if terminal.result is None:
            state = "failed" if isinstance(error, Exception) else "interrupted"
            error = full_disk(settings.home(), error) or error
            return {**_EMPTY, "state": state, "problems": problems(error, where)}
    finally:
        terminal.close()
    assert terminal.result is not None  # the flow tells it last of all
    return terminal.result


def _terminal(recipe: Recipe, quiet: bool) -> Terminal:
    if quiet:
        return Quiet()
    if not (draws(sys.stdout) and draws(sys.stderr)):
        return Terminal(recipe=recipe)
    from flows.reports.live import LiveTable

    return LiveTable(recipe)


def _again(flow: Flow[Any, Any], flow_run: FlowRun) -> State[Any]:
    from prefect.flow_engine import run_flow_sync
    from prefect.utilities.callables import get_call_parameters

    parameters = get_call_parameters(flow.fn, (), flow_run.parameters)
    state = run_flow_sync(flow, flow_run=flow_run, parameters=parameters, return_type="state")
    assert state is not None
    return state


def _say_next(recipe: Recipe, done: dict[str, Any], require_promotion: bool) -> int:
    """Tells what became of the model, and what to do with it; gives the exit code."""
    model, verdict = done["model"], Verdict.model_validate(done["verdict"])
    print(*verdict_lines(verdict), sep="\n")
    print(f"Model: {model['path']}")
    if model["registered"]:
        name, _, version = model["registered"].partition("/")
        print(f"Registered: {name} version {version}{', ' + model['alias'] if model['alias'] else ''}")
        from tasks.stages.register import example_arguments

        # The champion is the one that is asked by default.
        asked = {"champion": "", None: f"/{version}"}.get(model["alias"], f"@{model['alias']}")
        print(f"Ask it:     finetune predict {name}{asked} {example_arguments(recipe)}")
    elif recipe.release.registry is None:
        print("Register it: set release.registry in the recipe.")
    if model.get("published"):
        print(f"Published: {model['published']}")
    if require_promotion and model["alias"] != recipe.release.champion:
        print("Not promoted, which --require-promotion asks for.", file=sys.stderr)
        return FAILED
    return COMPLETED


def _write(out: Path | None, result: dict[str, Any]) -> None:
    if out is not None:
        write_atomically(out.absolute(), (json.dumps(result, indent=2) + "\n").encode())
