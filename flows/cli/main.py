"""The `finetune` command. Exit codes: 0 completed, 1 failed, 2 the user's mistake, 130 interrupted."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flows.cli import (
    check,
    data_updated,
    deploy,
    doctor,
    down,
    models,
    notify,
    plan,
    predict,
    promote,
    reproduce,
    resume,
    rollback,
    run,
    runs,
    schema,
    show,
    status,
    store,
    up,
)
from flows.cli.codes import FAILED, INTERRUPTED, code_of
from flows.cli.pipes import outlive_readers
from flows.reports.tables import problem_line
from tasks.cache import settings
from tasks.jobs.launch import JobFailed
from tasks.prefect import servers
from tasks.prefect.servers import ServicesFailed
from tasks.tracking.connection import MlflowFailed
from training.problems import UserError, full_disk

COMMANDS = (
    *(run, resume, plan, check, schema),
    *(runs, models, show, reproduce, promote, rollback, predict),
    *(up, deploy, data_updated, notify, status, down, doctor, store),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and gives its exit code."""
    arguments = _parsed(argv)
    if arguments.home:
        os.environ["FINETUNE_HOME"] = arguments.home
    settings.prepare_environment()
    try:
        servers.use()
        return int(arguments.act(arguments))
    except UserError as error:
        show_problems(_of_option(error) if arguments.home else error)
        return code_of(problem.kind for problem in error.problems if problem.level == "error")
    except (JobFailed, MlflowFailed, ServicesFailed) as error:
        print(error, file=sys.stderr)
        return FAILED
    except OSError as error:
        if full := full_disk(settings.home(), error):
            show_problems(full)
            return FAILED
        raise
    except KeyboardInterrupt:
        return INTERRUPTED


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Texts that are asked may stand behind options, where argparse has no more room for them."""
    whole = parser()
    arguments, rest = whole.parse_known_args(argv)
    if rest and (arguments.act is not predict.act or any(word.startswith("-") for word in rest)):
        whole.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.texts = [*arguments.texts, *rest]
    return arguments


def parser() -> argparse.ArgumentParser:
    """All subcommands and their arguments."""
    whole = argparse.ArgumentParser(prog="finetune", description="Fine-tune, evaluate and ship models.")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        command = module.add_parser(commands)
        command.add_argument("--home", metavar="DIR", help="where everything is stored (default: .finetune)")
        command.set_defaults(act=module.act)
    return whole


def show_problems(error: UserError) -> None:
    """Prints the user's mistakes, a line each."""
    for problem in error.problems:
        print(problem_line(problem.model_dump()), file=sys.stderr)


def _of_option(error: UserError) -> UserError:
    """The problems with FINETUNE_HOME as those of --home, which set it."""
    home = "FINETUNE_HOME"
    return UserError(one.model_copy(update={"where": "--home"}) if one.where == home else one for one in error.problems)


def start() -> None:
    """The console command."""
    outlive_readers()
    sys.exit(main())
