"""The module search path: the same in the flow's process, in the programs of jobs, and in keys.

Python's default order depends on how a process was started: `python -m` puts the working directory first, a console
script the folder of scripts, Prefect the folder of the flow. The programs of jobs use the order of the flow's process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("flows", "tasks", "training")
LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""Names of the folders that pip and the system's packages install into."""
VARIABLE = "FINETUNE_SEARCH_PATH"
"""Environment variable that passes the search path to the programs of jobs."""

_added_directories: set[str] = set()  # working directories, by this process
_STARTED = time.time()
_missed: set[str] = set()  # packages that were hidden while libraries were imported


def search_path() -> list[str]:
    """A checkout of this project, then the folders of `sys.path`, then the working directory.

    An installed project keeps its place in `sys.path`: in front, its folder would shadow PYTHONPATH and Python itself.
    The working directory is last, so that a file next to the recipe shadows no library, unless PYTHONPATH contains it.
    """
    if inherited := os.environ.get(VARIABLE):
        return inherited.split(os.pathsep)
    named = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    excluded = {os.getcwd(), *_added_directories} - named
    excluded |= {str(PROJECT / package) for package in OWN_PACKAGES}
    if is_installed():
        first, excluded = [], excluded - {str(PROJECT)}
    else:
        first, excluded = [str(PROJECT)], excluded | {str(PROJECT)}
    # An entry need not be a folder: an editable install may add a name that only its import hook understands.
    return [*first, *(entry for entry in sys.path if os.path.abspath(entry) not in excluded), os.getcwd()]


def is_installed() -> bool:
    """Whether this project is installed among the libraries, and not a checkout."""
    return PROJECT.name in LIBRARIES and str(PROJECT) in map(os.path.realpath, sys.path)


def python_path() -> str:
    """PYTHONPATH for this project's programs, which start without the working directory in their search path."""
    first = "" if is_installed() else str(PROJECT)
    return os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH", "")]))


def use_search_path() -> None:
    """Makes this process import from `search_path`."""
    sys.path[:] = search_path()
    _added_directories.add(os.getcwd())


def find_module(name: str) -> ModuleSpec | None:
    """The spec of a dotted module name, found without running any code; None if there is no such module."""
    spec, parent, places = None, "", search_path()
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
        if finder is PathFinder:
            spec = PathFinder.find_spec(name.rpartition(".")[2], places)
        elif (find_spec := getattr(finder, "find_spec", None)) is None:
            continue
        else:
            spec = find_spec(name, places if "." in name else None)
        if spec is not None:
            return spec
    return None


def modules_changed() -> bool:
    """Whether the file of an imported module has changed since this process, or the one it is a fork of, started."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    try:
        return any(os.stat(spec.origin).st_ctime >= _STARTED for spec in specs if spec and spec.has_location)
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
