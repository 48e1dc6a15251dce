"""The kinds of task, each one file: a class of training.kinds.base.Kind, here by name, or one of the recipe's author
as `module:Class`."""

from __future__ import annotations

from functools import cache

from training.kinds.base import Kind
from training.named import Place
from training.problems import Problem, UserError, nearest

KINDS: dict[str, str] = {
    "sequence-classification": "training.kinds.sequence_classification:SequenceClassification",
    "token-classification": "training.kinds.token_classification:TokenClassification",
}
"""A kind's name in the recipe and its class. The modules are imported by `load` only, so that a process pays for one
kind and a change to one kind's code leaves the artifacts of others valid."""


@cache
def load(name: str) -> Kind:
    """The kind of this name, or the author's. Raises UserError where there is none."""
    if name not in KINDS and ":" not in name:
        message = f"{name!r} is unknown: choose from {', '.join(KINDS)}, or name a class as module:Class."
        raise UserError([Problem(kind="recipe", where="kind", message=f"{message}{nearest(name, KINDS)}")])
    found: type[Kind] = _PLACE.load(KINDS.get(name, name))
    try:
        made = found()
    except Exception as error:  # it is the author's own, and may lack a method
        raise _PLACE.refused(f"{name!r} cannot be made: {error}.") from error
    if not hasattr(made, "columns"):
        raise _PLACE.refused(f"{name!r} does not say which columns of the rows it wants: give it `columns`.")
    return made


def code(name: str) -> list[str]:
    """The module that holds the kind's code, where that is the project's own."""
    return [KINDS[name].partition(":")[0]] if name in KINDS else []


def named(name: str) -> dict[str, str]:
    """The recipe's field that names the kind's code, where that is its author's."""
    return {} if name in KINDS else {"kind": name}


_PLACE = Place(
    kind="recipe",
    where="kind",
    example="my_kind:ExtractiveQA",
    accepted="a subclass of training.kinds.base.Kind",
    fits=lambda found: isinstance(found, type) and issubclass(found, Kind) and found is not Kind,
)
