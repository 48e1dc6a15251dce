"""`finetune resume [RUN]`: goes on with a run that did not complete: what finished is cached, training continues from
its newest checkpoint, the same MLflow run goes on, and names stay pinned to what they meant when it began."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from flows.cli.arguments import add_json_argument, add_quiet_argument, need_writable
from flows.cli.codes import COMPLETED
from flows.cli.run import go_on
from tasks.registry import consent
from training.recipe import parse


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser
    parser = commands.add_parser("resume", help="go on with a run that did not complete", description=__doc__)
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="a flow run's id, its beginning, or its name (default: the last one)"
    )
    add_json_argument(parser, "the run's result")
    add_quiet_argument(parser)
    parser.add_argument(consent.OPTION, action="store_true", help=consent.OPTION_HELP)
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Goes on with it here, or has a worker do so where it is a deployment's run.

    Raises UserError without one, and for code that the server names, unless this home ran it or --run-code is given.
    """
    need_writable(arguments.json)
    from tasks.prefect.ephemeral_server import ensure_prefect_server
    from tasks.prefect.flow_runs import find, schedule

    url = ensure_prefect_server()
    run = find(arguments.run)
    if run.deployment_id is not None:
        schedule(run)
        print(f"{run.name} ({run.id}): a worker goes on with it. {url.removesuffix('/api')}/runs/flow-run/{run.id}")
        return COMPLETED
    parameters = run.parameters
    values, overrides = parameters["recipe"], parameters.get("overrides")
    if not arguments.run_code:
        consent.require("the Prefect server", values, overrides=overrides, run=str(run.id))
    recipe = parse(values, overrides)
    # With the parameters that were looked at, whatever the server gives by now.
    run = schedule(run).model_copy(update={"parameters": parameters})
    if not arguments.quiet:
        print(f"{recipe.name}: going on with {run.id}", file=sys.stderr)
    return go_on(recipe, run, arguments.json, arguments.quiet)
