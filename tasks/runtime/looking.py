"""The walk over the stages that only looks: what is cached, what would run, and why."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.runtime import store
from tasks.runtime.history import History
from tasks.runtime.refs import Pins
from tasks.runtime.stage import Stage, Work


class Unknown:
    """What a stage that has not run would hand on."""


UNKNOWN = Unknown()
_NOWHERE = Path(os.devnull)


@dataclass(frozen=True)
class Foreseen:
    """One line of a plan."""

    name: str
    state: str
    """cached, ran (an action that only reads), will run, or may run."""
    key: str | None
    """None where an input is not known yet."""
    reasons: tuple[str, ...] = ()
    figures: Mapping[str, Any] | None = None


class Looking:
    """Walks a composition of stages and changes nothing.

    Args:
        recipe: its name, to compare a missing stage with the last one made for it.
        force: stages that would be made anew, by name.
    """

    def __init__(self, recipe: str, force: frozenset[str] = frozenset()) -> None:
        self.rows: list[Foreseen] = []
        self.inputs: dict[str, tuple[Any, ...]] = {}
        """What each stage would be given."""
        self._history = History(recipe)
        self._force = force

    def __call__(self, stage: Stage[Any], *inputs: Any) -> Any:
        """The stage's result where it is known without running it, else UNKNOWN."""
        result, row = self._look(stage, inputs)
        self.rows.append(row)
        self.inputs[stage.name] = inputs
        return result

    def together(self) -> AbstractContextManager[None]:
        """As for whoever runs them; nothing is done here."""
        return nullcontext()

    def _look(self, stage: Stage[Any], inputs: tuple[Any, ...]) -> tuple[Any, Foreseen]:
        if any(isinstance(value, Unknown) for value in inputs):
            if stage.where:
                return UNKNOWN, Foreseen(stage.name, "may run", None, (f"where {stage.where}",))
            above = [row.name for row in self.rows if row.state == "will run"]
            return UNKNOWN, Foreseen(stage.name, "will run", None, (f"{above[-1]} runs before it",))
        if stage.foreseeable:
            result = stage.make(Work(key="", out=_NOWHERE, run=""), *inputs)
            flat, _ = stage.flat_ingredients(*inputs)
            notes = tuple(result.notes) if isinstance(result, Pins) else ()
            return result, Foreseen(stage.name, "ran", stage.key(flat), notes)
        flat, names = stage.flat_ingredients(*inputs)
        key = stage.key(flat)
        if not stage.cached:
            if self._history.last_key(stage.name) != key:
                return UNKNOWN, Foreseen(stage.name, "will run", key, ("it acts on the outside world",))
            return self._given_before(stage, key), Foreseen(stage.name, "cached", key)
        if stage.name in self._force:
            return UNKNOWN, Foreseen(stage.name, "will run", key, ("forced",))
        try:
            ref = store.find(stage.name, key)
        except store.Damaged as damage:
            return UNKNOWN, Foreseen(stage.name, "will run", key, (f"damaged: {damage}",))
        if ref is None:
            return UNKNOWN, Foreseen(stage.name, "will run", key, self._why_missing(stage, key, flat, names))
        return ref, Foreseen(stage.name, "cached", key, figures=ref.figures)

    def _given_before(self, stage: Stage[Any], key: str) -> Any:
        """What an action that would do the same again gave."""
        if stage.gives is None:
            return UNKNOWN
        try:
            values = self._history.last_result(stage.name, key)
            return None if values is None else stage.gives.model_validate(values)
        except (LookupError, ValueError):  # of an earlier version of the project
            return UNKNOWN

    def _why_missing(self, stage: Stage[Any], key: str, flat: dict[str, Any], names: dict[str, str]) -> tuple[str, ...]:
        last = self._history.last_key(stage.name)
        if last is None:
            return ("it has not run before",)
        before = store.ingredients_of(stage.name, last)
        if last == key or before is None:
            return ("its artifact is gone",)
        return tuple(differences(before, flat, names))


def differences(before: Mapping[str, Any], now: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """What changed between two sets of ingredients, a phrase each, the user's own fields first."""
    phrases: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        sort, _, rest = name.partition(".")
        if sort == "code":
            verb = "added" if old is None else "removed" if new is None else "changed"
            phrases[1].append(f"{rest} {verb}")
        elif sort == "library":
            phrases[2].append(f"{rest} {_shown(old)} → {_shown(new)}")
        elif sort == "upstream":
            phrases[0].append(f"{rest} gave something else")
        elif sort == "files":
            phrases[0].append(f"{names.get(name, rest)} {'is gone' if new is None else 'changed'}")
        else:
            phrases[0].append(f"{names.get(name, name)} {_shown(old)} → {_shown(new)}")
    return [phrase for group in phrases.values() for phrase in group]


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "…"
