"""Objects of the user's that a recipe names as `module:name`: one way to find them, one way to say what is wrong."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.jobs.search_path import use_search_path
from training.problems import Problem, UserError, nearest


@dataclass(frozen=True)
class Place:
    """A field of the recipe that names such an object."""

    kind: str
    """Of its problems: see `Problem.kind`."""
    where: str
    """The field, such as `training.loss`."""
    example: str
    """What one may look like: `my_losses:hinge`."""
    accepted: str
    """What the object must be, in words that follow "it must be"."""
    fits: Callable[[Any], bool]
    """Whether an object is one."""

    def load(self, name: str) -> Any:
        """The object that `module:name` names, importable from the working directory too.

        Raises UserError when there is no such module or name, when importing it fails, or when it does not fit.
        """
        module_name, _, attribute = name.partition(":")
        if not module_name or not attribute:
            raise self.refused(f"{name!r} names nothing: write module:name, for example {self.example}.")
        module = self._imported(module_name, name)
        if not hasattr(module, attribute):
            offered = [key for key, value in vars(module).items() if self.fits(value) and not key.startswith("_")]
            near = nearest(attribute, offered)
            raise self.refused(f"{module_name!r} has no {attribute!r}: it has {', '.join(offered) or 'none'}.{near}")
        found = getattr(module, attribute)
        if not self.fits(found):
            what = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
            raise self.refused(f"{name!r} is {what}: it must be {self.accepted}.")
        return found

    def _imported(self, module_name: str, name: str) -> Any:
        use_search_path()
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not f"{module_name}.".startswith(f"{missing}."):
                raise self.refused(f"importing {module_name!r} failed: {error}") from error
            near = nearest(missing.rpartition(".")[2], _modules_beside(missing))
            raise self.refused(f"{name!r}: there is no module {missing!r} here or installed.{near}") from error
        except (Exception, SystemExit) as error:
            raise self.refused(
                f"importing {module_name!r} failed: {type(error).__name__}: {error}{_place(error)}"
            ) from error

    def refused(self, message: str) -> UserError:
        """The error that says so of this field."""
        return UserError([Problem(kind=self.kind, where=self.where, message=message)])


def _place(error: BaseException) -> str:
    """Where in a file an import failed; nothing for what says so itself."""
    if isinstance(error, SyntaxError):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith("<")]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _modules_beside(missing: str) -> Iterable[str]:
    """The modules that lie where the missing one was looked for."""
    parent = missing.rpartition(".")[0]
    folders = [Path(entry) for entry in sys.modules[parent].__path__] if parent else [Path.cwd()]
    for folder in folders:
        yield from (file.stem for file in folder.glob("*.py"))
        yield from (file.parent.name for file in folder.glob("*/*.py"))


@contextmanager
def users_mistake(where: str) -> Iterator[None]:
    """What transformers refuses while it makes things of a recipe's settings, as a UserError of that field."""
    try:
        yield
    except (TypeError, ValueError, ImportError, NotImplementedError) as error:
        raise UserError([Problem(kind="training", where=where, message=str(error))]) from error
