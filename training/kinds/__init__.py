"""The kinds of task, each one file: a class of training.kinds.base.Kind, here by name, or one of the recipe's author
as `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from training.kinds.base import Kind
from training.kinds.names import KINDS
from training.named import Place
from training.problems import Problem, UserError, nearest

__all__ = ["KINDS", "class_of", "code", "has_baseline", "load", "named", "of"]


def load(kind: str, options: Mapping[str, Any] | None = None) -> Kind:
    """The kind of this name, or the author's, with these options. Raises UserError where there is none, or it takes no
    such options."""
    made = class_of(kind)
    try:
        return made(options)
    except ValidationError as error:
        places = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
        raise UserError(
            Problem(kind="recipe", where=f"options.{name}", message=f"{said}.") for name, said in places
        ) from error
    except Exception as error:  # it is the author's own, and may lack a method
        raise _PLACE.refused(f"{kind!r} cannot be made: {error}.") from error


def of(settings: Mapping[str, Any]) -> Kind:
    """That of a job, which is told its `kind`, and its `options` where it has any."""
    return load(settings["kind"], settings.get("options"))


def class_of(name: str) -> type[Kind]:
    """Its class. Raises UserError as `load` does."""
    if name not in KINDS and ":" not in name:
        message = f"{name!r} is unknown: choose from {', '.join(KINDS)}, or name a class as module:Class."
        raise UserError([Problem(kind="recipe", where="kind", message=f"{message}{nearest(name, KINDS)}")])
    found: type[Kind] = _PLACE.load(KINDS.get(name, name))
    if lacking := [said for said in ("columns", "auto_class", "task", "does") if not hasattr(found, said)]:
        raise _PLACE.refused(
            f"{name!r} does not say all of itself: give it {', '.join(f'`{said}`' for said in lacking)}."
        )
    return found


def has_baseline(name: str) -> bool:
    """Whether the kind has constant answers; a first model must beat the best of them."""
    return class_of(name).baseline is not Kind.baseline


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
