"""A flow called in this process, with its stages on the terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flows.cli.shared import INTERRUPTED, exit_code
from flows.reports.result import build_result, state_of
from flows.reports.tables import problem_line
from flows.reports.terminal import Quiet, Terminal, open_terminal
from tasks.cache.results import Lock
from tasks.cache.stage import Listener
from tasks.home import home
from tasks.services.prefect_server import ensure_prefect_server
from tasks.tracking import connection
from training.problems import full_disk
from training.recipe import Recipe

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

    from flows.callers import Caller

SILENT_S = 60.0
"""Without a trace for so long, a run that no process runs was killed."""


def fine_tune_here(
    recipe: Recipe,
    *listeners: Listener,
    overrides: dict[str, Any] | None = None,
    force: frozenset[str] = frozenset(),
    recorded: Lock | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Runs the flow `finetune` in this process. Returns its result as JSON values, for failed runs as well.

    Args:
        recipe: The recipe, overrides included.
        listeners: Listeners besides the terminal.
        overrides: The overrides, for the parameters and the name of the flow run.
        force: Stages to run although their output is stored.
        recorded: The lock of the run that is reproduced, whose names are not resolved again.
        quiet: Whether to print only the result.
    """

    def call(caller: Caller) -> Any:
        from flows.finetune import finetune, run_finetune

        bound = caller.bind(finetune, run_finetune, recorded=recorded)
        return bound(recipe=recipe, overrides=overrides or None, force=sorted(force), return_state=True)

    return call_in_this_process(call, open_terminal(recipe, quiet), *listeners)


def retry_here(recipe: Recipe, flow_run: FlowRun, quiet: bool) -> dict[str, Any]:
    """Runs a flow run of the recipe again in this process, with its own parameters. Returns its result."""

    def call(caller: Caller) -> Any:
        from prefect.flow_engine import run_flow_sync
        from prefect.utilities.callables import get_call_parameters

        from flows.finetune import finetune, run_finetune
        from flows.retrain import retrain, run_retrain
        from tasks.prefect.flow_runs import flow_name

        if flow_name(flow_run) == retrain.name:
            flow = caller.bind(retrain, run_retrain)
        else:
            flow = caller.bind(finetune, run_finetune)
        parameters = get_call_parameters(flow.fn, (), flow_run.parameters)
        return run_flow_sync(flow, flow_run=flow_run, parameters=parameters, return_type="state")

    return call_in_this_process(call, open_terminal(recipe, quiet))


def _build_failure(state: str, error: BaseException, where: str) -> dict[str, Any]:
    return build_result(state, [], error=error, where=where)


def call_in_this_process(
    call: Callable[[Caller], Any],
    terminal: Terminal | Quiet,
    *listeners: Listener,
    build_failure: Callable[[str, BaseException, str], dict[str, Any]] = _build_failure,
) -> dict[str, Any]:
    """Calls a flow with a Prefect server, and returns the result that the terminal receives.

    Args:
        call: Calls the flow for a caller. Returns the state of the flow run.
        terminal: Shows the run.
        listeners: Listeners of the stages besides the terminal.
        build_failure: Builds the result of a flow that ended before it had one, from its state, its error and the place
            of the error; by default the result of a fine-tune.
    """
    # Prefect's lines go to its server and UI; here, the table of stages shows the same.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")  # such as each failed call to a server
    logging.raiseExceptions = False
    where = "prefect"
    try:
        ensure_prefect_server(meanwhile=_import_flow)
        from flows.callers import Caller
        from tasks.prefect import events, flow_runs

        flow_runs.deliver_final_states()
        with contextlib.suppress(Exception):  # those of this home that were killed; the next command reports them
            flow_runs.report_killed(SILENT_S)
        with events.without_prefect_heartbeats():
            state = call(Caller((terminal, *listeners), is_command=True))
        if terminal.result is None:
            where = "run"
            state.result()  # raises the error of a flow that failed outside its stages
    except BaseException as error:  # the result contains the error if the flow got as far as its stages
        if terminal.result is None:
            return build_failure(state_of(error), full_disk(home(), error) or error, where)
    finally:
        terminal.close()
    assert terminal.result is not None  # the flow's last act
    return terminal.result


def _import_flow() -> None:
    """Imports the libraries of a flow, of its first stages and of its tracking."""
    import matplotlib.figure  # noqa: F401

    from flows import finetune  # noqa: F401

    connection.import_store()


def print_failure(result: dict[str, Any]) -> int:
    """Prints the problems of a run that did not complete; returns the exit code."""
    if result["state"] == "interrupted":
        return INTERRUPTED
    for problem in result["problems"]:
        print(problem_line(problem), file=sys.stderr)
    return exit_code(problem["kind"] for problem in result["problems"] if problem.get("level") != "warning")


def exit_without_server(result: dict[str, Any], code: int) -> None:
    """Ends this process at once if the Prefect server is down: at a normal exit, Prefect would try for minutes to send
    its last log lines."""
    from tasks.prefect import flow_runs

    if result["flow_run_id"] and flow_runs.has_pending_state(result["flow_run_id"]):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
