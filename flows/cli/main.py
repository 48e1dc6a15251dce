"""The `finetune` command. Exit codes: 0 completed, 1 failed, 2 the user's mistake, 130 interrupted."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

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
from flows.cli.shared import FAILED, INTERRUPTED, exit_code
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


def start() -> None:
    """The console command."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, _survive_closed_pipe(getattr(sys, name)))
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code. SIGTERM does what Ctrl-C does."""
    finetune = parser()
    arguments, rest = finetune.parse_known_args(argv)
    if rest:  # argparse stops at an option, as in `finetune predict NAME --task MODULE:CLASS TEXT`
        if "texts" not in arguments or any(word.startswith("-") for word in rest):
            finetune.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.texts += rest
    if arguments.home:
        os.environ["FINETUNE_HOME"] = arguments.home
    settings.prepare_environment()
    sigterm = signal.signal(signal.SIGTERM, _interrupt)
    try:
        servers.use_home_servers()
        return int(arguments.execute(arguments))
    except UserError as error:
        _print_problems(error, arguments.home)
        return exit_code(problem.kind for problem in error.problems if problem.level == "error")
    except (JobFailed, MlflowFailed, ServicesFailed) as error:
        print(error, file=sys.stderr)
        return FAILED
    except OSError as error:
        if full := full_disk(settings.home(), error):
            _print_problems(full, arguments.home)
            return FAILED
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, sigterm)


def parser() -> argparse.ArgumentParser:
    """Builds the parser of all subcommands. The help of each is its module's docstring."""
    finetune = argparse.ArgumentParser(prog="finetune", description="Fine-tune, evaluate and ship models.")
    commands = finetune.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        name, text = module.__name__.rpartition(".")[2].replace("_", "-"), str(module.__doc__)
        command = commands.add_parser(name, help=text.partition("\n")[0], description=text)
        if hasattr(module, "add_arguments"):
            module.add_arguments(command)
        command.add_argument("--home", metavar="DIR", help="the folder of all stored data (default: .finetune)")
        command.set_defaults(execute=module.execute)
    return finetune


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _print_problems(error: UserError, home_option: str | None) -> None:
    for problem in error.problems:
        if problem.where == "FINETUNE_HOME" and home_option:
            problem = problem.model_copy(update={"where": "--home"})
        print(problem_line(problem.model_dump()), file=sys.stderr)


class _Pipe(io.FileIO):
    """A descriptor that discards its data after its reader has gone, so that the command completes."""

    def write(self, data: object, /) -> int:
        """As FileIO. After a broken pipe the descriptor is /dev/null, for child programs as well."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data)  # type: ignore[arg-type]


def _survive_closed_pipe(stream: io.TextIOWrapper | None) -> io.TextIOWrapper | None:
    """Returns a stream to the same descriptor whose reader may go away, as in `finetune show NAME | head`."""
    if stream is None:  # the caller closed it
        return None
    stream.flush()
    buffer = io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
