"""Execution of a command, with errors as messages and exit codes; arguments and output files of several commands."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from flows.reports.tables import problem_line
from tasks import servers
from tasks.environment_variables import find_environment_problems, prepare_environment
from tasks.home import home
from tasks.jobs.launch import JobFailed
from tasks.servers import ServicesFailed
from tasks.tracking.connection import MlflowFailed
from training.jobs.protocol import without_nan, write_atomically
from training.problems import DISK, NETWORK, UserError, full_disk, rename
from training.recipe import Recipe, load, parse_set

COMPLETED, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

# Kinds of problems that are not the user's mistake.
FAILURES = {"internal", "out_of_memory", "interrupted", "lost_rank", "stalled", "not_started", DISK, NETWORK}


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


def exit_code(kinds: Iterable[str]) -> int:
    """Returns the exit code for problems of these kinds: USER_ERROR if at least one is the user's mistake."""
    return FAILED if FAILURES.issuperset(kinds) else USER_ERROR


def name_options(problems: Iterable[Mapping[str, Any]], options: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the problems of a flow's result with the options of the command in place of the flow's parameters, as
    `training.problems.rename` does."""
    return [{**problem, "where": rename(problem["where"], options)} for problem in problems]


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds FILE, --entry and --set."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a deployment file, such as deployments/demo.yaml")
    parser.add_argument("--entry", metavar="NAME", help="the entry of the file; needed if it has several")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="override a field of the recipe, such as training.learning_rate=3e-5; the value is YAML; repeatable",
    )


def add_version_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the name of a registered version, and --task."""
    parser.add_argument(
        "model",
        metavar="NAME[@ALIAS|/VERSION]",
        help="a registered model; without alias and version, its champion",
    )
    add_task_argument(parser)


def add_task_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --task, the user's consent to the code of a version's own task type."""
    parser.add_argument(
        "--task",
        metavar="MODULE:CLASS",
        default="",
        help="the class of the model's task type if it is your own; its code is run",
    )


def add_reading_argument(parser: argparse.ArgumentParser, other: str = "") -> None:
    """Adds --set, for fields of `data`. `other` describes further fields of the command."""
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="read the rows with another value of a field of the recipe's data, such as data.delimiter=;, or "
        f"data.filter=null{other}; the value is YAML; repeatable",
    )


def parse_reading(settings: Iterable[str]) -> dict[str, Any]:
    """Returns the fields of `data` in the values of --set. Raises UserError for other fields."""
    found = parse_set(settings)
    if others := [name for name in found if not name.startswith("data.")]:
        message = f"{', '.join(others)}: only fields of data can be set here, such as data.delimiter=;."
        raise UserError.of("option", "--set", message)
    return {name.removeprefix("data."): value for name, value in found.items()}


def load_recipe(arguments: argparse.Namespace) -> Recipe:
    """Loads the recipe of FILE, --entry and --set. Raises UserError with all mistakes."""
    return load(arguments.file, parse_set(arguments.set), arguments.entry)


def add_json_argument(parser: argparse.ArgumentParser, content: str) -> None:
    """Adds --json."""
    parser.add_argument("--json", metavar="OUT", type=output_file, help=f"write {content} to this JSON file")


def add_limit_argument(parser: argparse.ArgumentParser, subject: str) -> None:
    """Adds --limit: the number of lines of a list."""
    parser.add_argument("--limit", metavar="N", type=positive, default=20, help=f"{subject} (default: %(default)s)")


def positive(text: str) -> int:
    """Type of an argument that is a number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def add_quiet_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --quiet."""
    parser.add_argument("--quiet", action="store_true", help="print only the result and errors")


def output_file(text: str) -> Path:
    """Type of an argument that names a file to write: it must be writable before any work is done."""
    out = Path(text).absolute()
    if not out.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{out.parent} is not a folder: create it, or name another file.")
    if out.exists() and not out.is_file():
        raise argparse.ArgumentTypeError(f"{out} is not a regular file: name a file.")
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            return out
    except OSError as error:
        message = f"{out.parent} is not writable ({error.strerror}): name a file in another folder."
        raise argparse.ArgumentTypeError(message) from error


def write_json(out: Path | None, value: Any) -> None:
    """Writes the value to the file of --json, if there is one; a number that is undefined is null."""
    if out is not None:
        text = json.dumps(without_nan(value), indent=2, ensure_ascii=False)
        write_atomically(out, f"{text}\n".encode(errors="backslashreplace"))  # half a character becomes its escape
