"""User code: objects that a recipe names as `module:name`."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.jobs.search_path import import_named
from training.problems import UserError, nearest


@dataclass(frozen=True)
class CodeField:
    """A field of the recipe that names an object of the user's code."""

    kind: str
    """The kind of its problems: see `Problem.kind`."""
    where: str
    """The field, such as `training.loss`."""
    example: str
    """A value of the field: `my_losses:hinge`."""
    accepted: str
    """The accepted objects, in words that follow "it must be"."""
    accepts: Callable[[Any], bool]
    """Whether an object is accepted."""

    def load(self, name: str) -> Any:
        """Returns the object `module:name`, importable from the working directory too.

        Raises UserError if there is no such module or name, if the import fails, or if the object is not accepted.
        """
        module_name, _, attribute = name.partition(":")
        if not module_name or not attribute:
            raise self.error(f"{name!r} is no module:name: write for example {self.example}.")
        module = self._import(module_name, name)
        if not hasattr(module, attribute):
            names = [key for key, value in vars(module).items() if self.accepts(value) and not key.startswith("_")]
            near = nearest(attribute, names)
            raise self.error(f"{module_name!r} has no {attribute!r}: it has {', '.join(names) or 'none'}.{near}")
        found = getattr(module, attribute)
        if not self.accepts(found):
            actual = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
            raise self.error(f"{name!r} is {actual}: it must be {self.accepted}.")
        return found

    def _import(self, module_name: str, name: str) -> Any:
        try:
            return import_named(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not f"{module_name}.".startswith(f"{missing}."):
                raise self.error(f"importing {module_name!r} failed: {error}") from error
            near = nearest(missing.rpartition(".")[2], _list_modules(missing.rpartition(".")[0]))
            raise self.error(f"{name!r}: there is no module {missing!r} here or installed.{near}") from error
        except (Exception, SystemExit) as error:
            raise self.error(
                f"importing {module_name!r} failed: {type(error).__name__}: {error}{_format_line(error)}"
            ) from error

    def error(self, message: str) -> UserError:
        """A UserError about this field."""
        return UserError.of(self.kind, self.where, message)


def is_function_of(arguments: int) -> Callable[[Any], bool]:
    """Returns a check, for `CodeField.accepts`, of whether an object is a function of so many arguments, and no
    class."""

    def is_one(found: Any) -> bool:
        try:
            inspect.signature(found).bind(*[None] * arguments)
        except (TypeError, ValueError):
            return False
        return callable(found) and not isinstance(found, type)

    return is_one


def _format_line(error: BaseException) -> str:
    """The file and line in which an import failed; empty for a SyntaxError, whose message contains them."""
    if isinstance(error, SyntaxError):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith("<")]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _list_modules(package: str) -> Iterable[str]:
    """The modules of a package, none of a module; those of the working directory for the empty name."""
    for folder in map(Path, getattr(sys.modules[package], "__path__", ())) if package else [Path.cwd()]:
        yield from (file.stem for file in folder.glob("*.py"))
        yield from (file.parent.name for file in folder.glob("*/*.py"))


@contextmanager
def blame_field(where: str) -> Iterator[None]:
    """Turns errors of transformers about the recipe's settings into a UserError about the field."""
    try:
        yield
    except (TypeError, ValueError, ImportError, NotImplementedError) as error:
        raise UserError.of("training", where, str(error)) from error
