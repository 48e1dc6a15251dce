"""The kinds of task, each one file. A new kind is a new line here and a file with the same names in it."""

from __future__ import annotations

import importlib
from types import ModuleType

from training.problems import Problem, UserError, nearest

KINDS: dict[str, str] = {
    "sequence-classification": "training.kinds.sequence_classification",
}
"""A kind's name in the recipe and the module that says what it is. The modules are imported by `load` only,
so that a process pays for one kind and a change to one kind's code leaves the artifacts of others valid."""


def load(name: str) -> ModuleType:
    """The module of a kind. Raises UserError for a name that is not in KINDS."""
    if name not in KINDS:
        message = f"kind={name!r} is unknown: choose from {', '.join(KINDS)}.{nearest(name, KINDS)}"
        raise UserError([Problem(kind="recipe", where="kind", message=message)])
    return importlib.import_module(KINDS[name])
