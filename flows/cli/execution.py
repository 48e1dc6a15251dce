"""Execution of a subcommand: environment, signals, and errors as messages with exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType

from flows.cli.shared import FAILED, INTERRUPTED, exit_code
from flows.reports.tables import problem_line
from tasks.environment import find_environment_problems, prepare_environment
from tasks.home import home
from tasks.jobs.launch import JobFailed
from tasks.prefect import servers
from tasks.prefect.servers import ServicesFailed
from tasks.tracking.connection import MlflowFailed
from training.problems import UserError, full_disk


def execute(arguments: argparse.Namespace) -> int:
    """Executes the subcommand and returns its exit code. SIGTERM does what Ctrl-C does."""
    if arguments.home:
        os.environ["FINETUNE_HOME"] = arguments.home
    prepare_environment()
    sigterm = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if problems := find_environment_problems():
            raise UserError(problems)
        servers.use_home_servers()
        return int(arguments.execute(arguments))
    except UserError as error:
        _print_problems(error, arguments.home)
        return exit_code(problem.kind for problem in error.problems if problem.level == "error")
    except (JobFailed, MlflowFailed, ServicesFailed) as error:
        print(error, file=sys.stderr)
        return FAILED
    except OSError as error:
        if full := full_disk(home(), error):
            _print_problems(full, arguments.home)
            return FAILED
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, sigterm)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _print_problems(error: UserError, home_option: str | None) -> None:
    for problem in error.problems:
        if problem.where == "FINETUNE_HOME" and home_option:
            problem = problem.model_copy(update={"where": "--home"})
        print(problem_line(problem.model_dump()), file=sys.stderr)
