"""Arguments that several subcommands share."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from training.problems import Problem, UserError
from training.recipe import Recipe, load, parse_set


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE, --entry and --set."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a deployment file, such as deployments/demo.yaml")
    parser.add_argument("--entry", metavar="NAME", help="the entry of the file, where it has several")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="replace a field of the recipe: training.learning_rate=3e-5; the value is read as YAML",
    )


def chosen_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe that the arguments name. Raises UserError with all mistakes."""
    return load(arguments.file, parse_set(arguments.set), arguments.entry)


def add_json_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """--json, which names the file for `what`."""
    parser.add_argument("--json", metavar="OUT", type=Path, help=f"write {what} to this file")


def add_quiet_argument(parser: argparse.ArgumentParser) -> None:
    """--quiet."""
    parser.add_argument("--quiet", action="store_true", help="print only the result, and what went wrong")


def need_writable(out: Path | None) -> None:
    """Raises UserError if the file that --json names cannot be written, before anything is done for it."""
    if out is not None and (message := unwritable(out)):
        raise UserError([Problem(kind="option", where="--json", message=message)])


def unwritable(out: Path) -> str | None:
    """Why no file can be written at this place, and what to do; None if one can."""
    folder = out.absolute().parent
    if not folder.is_dir():
        return f"{out.parent} is not a folder: make it, or name another file."
    if out.exists() and not out.is_file():
        return f"{out} is {'a folder' if out.is_dir() else 'no regular file'}: name a file."
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror}): name a file in another folder."
