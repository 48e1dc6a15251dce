"""The folders that modules are imported from: the same in the flow's process, in the programs it starts, and in keys.

Python's own order depends on how a process was started: `python -m` puts the working directory first, a console script
the folder of scripts, Prefect the folder of the flow. The programs of jobs take over the order of the flow's process.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("flows", "tasks", "training")
LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""Names of the folders that pip and the system's packages install into."""
VARIABLE = "FINETUNE_SEARCH_PATH"
"""The environment variable that hands the search path to the program of a job."""

_working_directories: set[str] = set()  # that this process has added


def search_path() -> list[str]:
    """A checkout of this project, then the folders of `sys.path`, then the working directory.

    An installed project keeps its place in `sys.path`: in front, its folder would shadow PYTHONPATH and Python itself.
    The working directory is last, so that a file beside the recipe shadows no library, unless PYTHONPATH names it.
    """
    if handed_over := os.environ.get(VARIABLE):
        return handed_over.split(os.pathsep)
    named = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    left_out = {os.getcwd(), *_working_directories} - named
    left_out |= {str(PROJECT / package) for package in OWN_PACKAGES}
    if is_installed():
        first, left_out = [], left_out - {str(PROJECT)}
    else:
        first, left_out = [str(PROJECT)], left_out | {str(PROJECT)}
    # An entry need not be a folder: an editable install may add a name that only its own import hook understands.
    return [*first, *(entry for entry in sys.path if os.path.abspath(entry) not in left_out), os.getcwd()]


def is_installed() -> bool:
    """Whether this project lies in a folder of libraries that Python searches anyway, rather than in a checkout."""
    return PROJECT.name in LIBRARIES and str(PROJECT) in map(os.path.realpath, sys.path)


def python_path() -> str:
    """PYTHONPATH for this project's programs, which start without a working directory in their search path."""
    first = "" if is_installed() else str(PROJECT)
    return os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH", "")]))


def use_search_path() -> None:
    """Has this process import from `search_path` from now on."""
    sys.path[:] = search_path()
    _working_directories.add(os.getcwd())


def find_module(name: str) -> ModuleSpec | None:
    """What importing the dotted name would load, found without running any code; None if there is no such module."""
    spec, above, places = None, "", search_path()
    for part in name.split("."):
        above = f"{above}.{part}" if above else part
        spec = _find(above, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec


def _find(name: str, places: list[str]) -> ModuleSpec | None:
    """The module, if one of Python's finders has it: in these places, or by a hook of an editable install."""
    for finder in sys.meta_path:
        # With the last part alone: for a whole name, Python wants the package above to be imported.
        if finder is PathFinder:
            spec = PathFinder.find_spec(name.rpartition(".")[2], places)
        elif (find_spec := getattr(finder, "find_spec", None)) is None:
            continue
        else:
            spec = find_spec(name, places if "." in name else None)
        if spec is not None:
            return spec
    return None
