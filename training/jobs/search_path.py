"""The module search path: the same in the flow's process, in the programs of jobs, and in keys.

Python's default order depends on how a process was started: `python -m` puts the working directory first, a console
script the folder of scripts, Prefect the folder of the flow. The programs of jobs use the order of the flow's process.

The working directory is searched, last, for the modules that a recipe names and for those that they import. It is not
in `sys.path`: libraries try to import packages that are not installed, and a file there could have such a name.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

PROJECT = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("flows", "tasks", "training")
LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""Names of the folders that pip and the system's packages install into."""
VARIABLE = "FINETUNE_SEARCH_PATH"
"""Environment variable that passes the search path to the programs of jobs."""

_STARTED = time.time()
_missed: set[str] = set()  # packages that were hidden while libraries were imported


def search_path() -> list[str]:
    """The folders of modules that a recipe names: a checkout of this project, those of `sys.path`, and the working
    directory.

    An installed project keeps its place in `sys.path`: in front, its folder would shadow PYTHONPATH and Python itself.
    The working directory is last, so that a file next to the recipe shadows no library, unless PYTHONPATH contains it.
    """
    if inherited := os.environ.get(VARIABLE):
        return inherited.split(os.pathsep)
    return list(_search_path(tuple(sys.path), os.environ.get("PYTHONPATH", ""), os.getcwd()))


@cache  # called hundreds of times while the code of a pipeline is found
def _search_path(entries: tuple[str, ...], python_path: str, working_directory: str) -> list[str]:
    named = {os.path.abspath(entry) for entry in python_path.split(os.pathsep) if entry}
    excluded = {working_directory} - named
    excluded |= {str(PROJECT / package) for package in OWN_PACKAGES}
    if is_installed():
        first, excluded = [], excluded - {str(PROJECT)}
    else:
        first, excluded = [str(PROJECT)], excluded | {str(PROJECT)}
    # An entry need not be a folder: an editable install may add a name that only its import hook understands.
    return [*first, *(entry for entry in entries if os.path.abspath(entry) not in excluded), working_directory]


def is_installed() -> bool:
    """Whether this project is installed among the libraries, and not a checkout."""
    return PROJECT.name in LIBRARIES and str(PROJECT) in map(os.path.realpath, sys.path)


def start_variables() -> dict[str, str]:
    """Environment variables for a `python -m`: without the working directory in its search path, which Python would put
    first there, and with this project."""
    first = "" if is_installed() else str(PROJECT)
    path = os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def use_search_path() -> None:
    """Makes this process import from `search_path`: from its last folder only for modules of the user's."""
    *sys.path[:], folder = search_path()
    if not any(isinstance(finder, _UserModules) and finder.folder == folder for finder in sys.meta_path):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _UserModules)]
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(place, _UserModules(folder))


def import_named(name: str) -> ModuleType:
    """Imports a module that a recipe names, which may lie in the working directory."""
    use_search_path()
    (finder,) = (finder for finder in sys.meta_path if isinstance(finder, _UserModules))
    before, finder.named = finder.named, name
    try:
        return importlib.import_module(name)
    finally:
        finder.named = before


class _UserModules:
    """Finds modules in the working directory: the named one, and those that modules from there import."""

    def __init__(self, folder: str) -> None:
        self.folder, self.named = folder, ""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Called for each import, before the finder of `sys.path`, whose result this includes."""
        if path is not None or not (f"{self.named}.".startswith(f"{name}.") or self._is_asked_from_here()):
            return None
        spec = PathFinder.find_spec(name, [*sys.path, self.folder])
        if spec is not None and spec.loader is None and spec.submodule_search_locations is not None:
            # Python would list the parts of a namespace package again, in `sys.path` alone.
            spec.submodule_search_locations = list(spec.submodule_search_locations)
        return spec

    def _is_asked_from_here(self) -> bool:
        """Whether the module with the import statement lies in the folder, or is a script or session started there."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("importlib"):
            if frame.f_code.co_name in ("create_module", "exec_module"):  # an extension module imports: it has no frame
                return False
            frame = frame.f_back
        top = str(frame.f_globals.get("__name__")).partition(".")[0] if frame else ""
        if top in OWN_PACKAGES or (module := sys.modules.get(top)) is None:
            return False
        file = getattr(module, "__file__", None)
        if top == "__main__" and file is None:
            return True
        places = [*getattr(module, "__path__", ()), *filter(None, [file])]
        return any(os.path.dirname(os.path.abspath(place)) == self.folder for place in places)


def find_module(name: str, *, here: bool = True) -> ModuleSpec | None:
    """The spec of a dotted module name, found without running any code; None if there is no such module.

    The working directory is searched if `here`: a recipe or a module in the working directory names the module.
    """
    spec, parent, places = None, "", search_path() if here else search_path()[:-1]
    for part in name.split("."):
        parent = f"{parent}.{part}" if parent else part
        spec = _find_in(places, parent)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec


def _find_in(places: list[str], name: str) -> ModuleSpec | None:
    """The module in these places, or as the import hook of an editable install finds it."""
    for finder in sys.meta_path:
        # With the last part alone: for a dotted name, Python wants the parent package to be imported.
        if isinstance(finder, _UserModules):
            continue
        if finder is PathFinder:
            spec = PathFinder.find_spec(name.rpartition(".")[2], places)
        elif find_spec := getattr(finder, "find_spec", None):
            spec = find_spec(name, places if "." in name else None)
        else:
            continue
        if spec is not None:
            return spec
    return None


def imported_files() -> str:
    """The files of all imported modules, each followed by a NUL. In one string: to look at each module again, a process
    with forks would copy their memory."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    return "".join(f"{spec.origin}\0" for spec in specs if spec and spec.has_location)


def files_changed(files: str) -> bool:
    """Whether one of the `imported_files` has changed since this process, or the one it is a fork of, started."""
    try:
        return any(os.stat(file).st_ctime >= _STARTED for file in files.split("\0")[:-1])
    except OSError:  # it was removed
        return True


def any_missed(packages: Collection[str]) -> bool:
    """Whether one of the packages was hidden while libraries were imported: see `hide_package`."""
    return not _missed.isdisjoint(packages)


@contextmanager
def hide_package(package: str) -> Iterator[None]:
    """Inside, `package` cannot be found or imported, unless it was imported before. Saves the seconds that an optional
    dependency of a library takes.

    A library that checks for it at import time remembers the result: accelerate and transformers, first imported
    inside, never support deepspeed in this process, and evaluate lacks its evaluators. A process that needs the package
    later imports such libraries first, outside, or starts anew: see `restart_with` in training/jobs/program.py.
    """
    hidden = package not in sys.modules
    if hidden:
        _missed.add(package)
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]
