"""The `finetune` command. Exit codes: 0 completed, 1 failed, 2 the user's mistake, 130 interrupted."""

from __future__ import annotations

import argparse
import ast
import atexit
import codecs
import gc
import io
import locale
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

COMMANDS = {
    "init": "init",
    "run": "run",
    "resume": "run",
    "sweep": "sweep",
    "plan": "plan",
    "check": "check",
    "power": "power",
    "schema": "deployments",
    "runs": "runs",
    "models": "models",
    "show": "runs",
    "reproduce": "reproduce",
    "verify": "signatures",
    "sign": "signatures",
    "promote": "models",
    "rollback": "models",
    "predict": "predict",
    "search": "search",
    "chat": "chat",
    "serve": "serve",
    "export": "models",
    "dossier": "models",
    "drift": "monitoring",
    "evaluate": "monitoring",
    "labels": "labels",
    "up": "services",
    "deploy": "deployments",
    "data-updated": "deployments",
    "notify": "deployments",
    "status": "services",
    "down": "services",
    "doctor": "services",
    "store": "store",
}
"""The module of each command in this folder. A function that is named as the command executes it, and its docstring is
the help. The module is imported when the command is chosen: `finetune --help` imports none."""


def start() -> None:
    """The console command."""
    _require_utf8()
    # Imports create many objects that stay: the default, 700, searches them for garbage during a tenth of the start.
    gc.set_threshold(20_000)
    # Pydantic looks for its plugins in the metadata of every installed package, in each process.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    for name in ("stdout", "stderr"):
        setattr(sys, name, _survive_closed_pipe(getattr(sys, name)))
    codes: list[int] = []
    atexit.register(_exit_at_once, codes)  # the first one that is registered is called last
    codes.append(main())
    sys.exit(codes[0])


def _require_utf8() -> None:
    """Begins again in Python's UTF-8 mode if the locale has another encoding: labels and texts are stored in UTF-8."""
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # also for the programs that it starts
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _exit_at_once(codes: list[int]) -> None:
    """Ends the process after all clean-up. Python would take a second or two more to free the libraries' objects."""
    if codes:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(codes[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code. SIGTERM does what Ctrl-C does."""
    words = sys.argv[1:] if argv is None else argv
    finetune = parser(words[:1])
    arguments, rest = finetune.parse_known_args(words)
    if rest:  # argparse stops at an option, as in `finetune predict NAME --task MODULE:CLASS TEXT`
        if "texts" not in arguments or any(word.startswith("-") for word in rest):
            finetune.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.texts += rest
    from flows.cli.shared import execute

    return execute(arguments)


def parser(only: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Builds the parser of all subcommands, or of one if `only` names it: it reads the file of each for its help."""
    finetune = argparse.ArgumentParser(prog="finetune", description="Fine-tune, evaluate and ship models.")
    commands = finetune.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name in COMMANDS.keys() & only or COMMANDS:
        text = _docstrings(COMMANDS[name])[_function(name)]
        commands.add_parser(name, command=name, help=text.partition("\n")[0], description=text)
    return finetune


class _CommandParser(argparse.ArgumentParser):
    """The parser of one subcommand, which adds the arguments of the command's module at the first use."""

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(**options)
        self.command = command
        self.is_complete = False

    def parse_known_args(self, *words: Any, **options: Any) -> Any:
        """As ArgumentParser."""
        self.complete()
        return super().parse_known_args(*words, **options)

    def complete(self) -> argparse.ArgumentParser:
        """Adds the arguments if they are missing. Returns the parser."""
        if not self.is_complete:
            module = import_module(f"flows.cli.{COMMANDS[self.command]}")
            name = _function(self.command)
            if add_arguments := getattr(module, f"add_{name}_arguments", None):
                add_arguments(self)
            self.add_argument("--home", metavar="DIR", help="the folder of all stored data (default: .finetune)")
            self.set_defaults(execute=getattr(module, name))
            self.is_complete = True
        return self


def _function(command: str) -> str:
    return command.replace("-", "_")


@cache
def _docstrings(module: str) -> dict[str, str]:
    """Reads the docstrings of the module's functions without running its imports."""
    source = ast.parse(Path(__file__).with_name(f"{module}.py").read_bytes())
    return {node.name: ast.get_docstring(node) or "" for node in source.body if isinstance(node, ast.FunctionDef)}


class _Output(io.TextIOWrapper):
    """The output of a command. On a terminal, sequences are written as text, except those of colours, lines and the
    cursor, which tables draw with: a row could set the clipboard, or ask the terminal to type."""

    def write(self, text: str, /) -> int:
        """As TextIOWrapper."""
        if self.isatty():
            text = _SEQUENCE.sub(lambda found: found[1] or found[0].encode("unicode_escape").decode(), text)
        return super().write(text)


_SEQUENCE = re.compile("(\x1b\\[[0-9;]*[mAKHJ]|\x1b\\[\\?25[lh])|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")


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
    # PYTHONIOENCODING may name an encoding without the characters of tables.
    errors = stream.errors if stream.errors != "strict" else "backslashreplace"
    return _Output(buffer, stream.encoding, errors, line_buffering=stream.line_buffering)
