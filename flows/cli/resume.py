"""Continue a run that did not complete.

Completed stages stay cached, training continues from its newest checkpoint in the same MLflow run, and names of data
and models stay pinned to their versions at the start of the run.
"""

from __future__ import annotations

import argparse
import sys

from flows.cli.run import retry
from flows.cli.shared import COMPLETED, add_json_argument, add_quiet_argument
from tasks.registry import untrusted_code
from training.problems import UserError
from training.recipe import SWEEP_ENTRYPOINT, parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a flow run's id, its first digits, or its name (default: the last)",
    )
    add_json_argument(parser, "the run's result")
    add_quiet_argument(parser)
    parser.add_argument(untrusted_code.OPTION, action="store_true", help=untrusted_code.OPTION_HELP)


def execute(arguments: argparse.Namespace) -> int:
    """Continues the run here, or schedules it for a worker if it belongs to a deployment.

    Raises UserError for an unknown run, and for code that the recipe names unless this home ran it before or --run-code
    is given.
    """
    from tasks.prefect.deployments import FLOWS
    from tasks.prefect.flow_runs import find, flow_name, schedule
    from tasks.prefect.prefect_server import ensure_prefect_server

    url = ensure_prefect_server()
    run = find(arguments.run)
    if run.deployment_id is not None:
        schedule(run)
        page = f"{url.removesuffix('/api')}/runs/flow-run/{run.id}"
        print(f"{run.name} ({run.id}): a worker continues it. {page}")
        return COMPLETED
    if run.parent_task_run_id is not None or flow_name(run) == FLOWS[SWEEP_ENTRYPOINT]:
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
    return retry(recipe, run, arguments.json, arguments.quiet)
