"""The planner: names the stages without running them, and finds which are cached, which would run, and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.cache import store
from tasks.cache.history import History
from tasks.cache.remote import Progress, Remote, no_progress
from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Stage, Work, without_number


class Unknown:
    """The result of a stage that has to run first."""


@dataclass(frozen=True)
class Repeatable(Unknown):
    """The result of a stage that runs and may have the same output as last time."""

    last: Any = None
    """The last output; None if it is unknown."""


UNKNOWN = Unknown()
_NOWHERE = Path(os.devnull)


@dataclass(frozen=True)
class PlannedStage:
    """One line of a plan."""

    name: str
    state: str
    """cached, ran (a read-only action), will run, or may run: if the output of an earlier stage changes, or if there
    is a champion."""
    key: str | None
    """None if an input is unknown."""
    reasons: tuple[str, ...] = ()


class Planner:
    """Names the stages of a pipeline and changes nothing, except that it fetches artifacts of other machines: inputs
    of later stages are read from their files.

    Args:
        recipe: its name, to compare the inputs of a stage with those of its last run.
        force: the stages to run although their output is stored.
        remote: artifacts of other machines.
        fetch_progress: gives the function that shows the download of a stage's artifact.
    """

    executes = False

    def __init__(
        self,
        recipe: str,
        force: frozenset[str] = frozenset(),
        remote: Remote | None = None,
        fetch_progress: Callable[[str], Progress] = lambda stage: no_progress,
    ) -> None:
        self.rows: list[PlannedStage] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}
        """The arguments of each stage."""
        self._history = History(recipe)
        self._force = force
        self._remote, self._fetch_progress = remote or Remote(), fetch_progress

    def __call__(self, stage: Stage[Any], *arguments: Any) -> Any:
        """The stage's result if it is known without running it, else Unknown."""
        result, row = self._look(stage, arguments)
        self.rows.append(row)
        self.arguments[stage.name] = arguments
        return result

    def transaction(self) -> AbstractContextManager[None]:
        """As in the executor; a planner has nothing to undo."""
        return nullcontext()

    def _look(self, stage: Stage[Any], arguments: tuple[Any, ...]) -> tuple[Any, PlannedStage]:
        unknown = [value for value in arguments if isinstance(value, Unknown)]
        if unknown:
            return self._look_ahead(
                stage, arguments, [value for value in unknown if isinstance(value, Repeatable)] == unknown
            )
        if stage.read_only:
            prepared = stage.prepare(*arguments)
            result = prepared.run(Work(key="", out=_NOWHERE, run=""))
            flat, _ = stage.flatten_inputs(prepared)
            notes = tuple(result.notes) if isinstance(result, Lock) else ()
            return result, PlannedStage(stage.name, "ran", stage.key(flat), notes)
        flat, names = stage.flat_inputs(*arguments)
        key = stage.key(flat)
        if not stage.cached:
            if self._history.last_key(stage.name) != key:
                return UNKNOWN, PlannedStage(stage.name, "will run", key, ("it acts on the outside world",))
            return self._last_result(stage, key), PlannedStage(stage.name, "cached", key)
        if without_number(stage.name) in self._force:
            return UNKNOWN, PlannedStage(stage.name, "will run", key, ("forced",))
        artifact, reasons = self._find(stage, key, flat, names)
        if artifact is None:
            return self._expect(stage), PlannedStage(stage.name, "will run", key, reasons)
        return artifact, PlannedStage(stage.name, "cached", key)

    def _look_ahead(self, stage: Stage[Any], arguments: tuple[Any, ...], perhaps: bool) -> tuple[Any, PlannedStage]:
        """A stage after one that has to run. `perhaps`: all such stages may have the same output as last time."""
        states = ("will run", "may run") if perhaps else ("will run",)
        # No earlier stage has to run if only the result of a completed action was lost.
        above = next((row.name for row in reversed(self.rows) if row.state in states), "an earlier stage")
        if stage.where:
            return Repeatable() if perhaps else UNKNOWN, PlannedStage(
                stage.name, "may run", None, (f"where {stage.where}",)
            )
        if not perhaps:
            return UNKNOWN, PlannedStage(stage.name, "will run", None, (f"{above} runs before it",))
        may_run = PlannedStage(stage.name, "may run", None, (f"only if {above} gives something else than last time",))
        if any(isinstance(value, Repeatable) and value.last is None for value in arguments):
            return Repeatable(), may_run
        flat, names = stage.flat_inputs(
            *(value.last if isinstance(value, Repeatable) else value for value in arguments)
        )
        key = stage.key(flat)
        if not stage.cached:
            same = stage.read_only or self._history.last_key(stage.name) == key
            row = PlannedStage(stage.name, "will run", None, ("its inputs are different",))
            return (Repeatable(), may_run) if same else (UNKNOWN, row)
        if without_number(stage.name) in self._force:
            return UNKNOWN, PlannedStage(stage.name, "will run", None, ("forced",))
        artifact, reasons = self._find(stage, key, flat, names)
        if artifact is None:
            return self._expect(stage), PlannedStage(stage.name, "will run", None, reasons)
        return Repeatable(artifact), may_run

    def _find(
        self, stage: Stage[Any], key: str, flat: dict[str, Any], names: dict[str, str]
    ) -> tuple[Artifact | None, tuple[str, ...]]:
        """The artifact, or None and the reasons why it is missing."""
        try:
            artifact = store.find(stage.name, key)
        except store.Damaged as damage:
            return None, (f"damaged: {damage}",)
        if artifact is None:
            artifact = self._remote.find(stage.name, key, self._fetch_progress(stage.name))
        if artifact is None:
            return None, self._explain_missing(stage, key, flat, names)
        return stage.open(artifact), ()

    def _expect(self, stage: Stage[Any]) -> Unknown:
        """The expected result of a stage that will run: its last one if changed inputs often give the same output."""
        last = self._history.last_key(stage.name) if stage.may_repeat else None
        try:
            artifact = store.find(stage.name, last) if last else None
            return Repeatable(stage.open(artifact)) if artifact else UNKNOWN
        except (store.Damaged, ValidationError):  # damaged, or another version of this project made it
            return UNKNOWN

    def _last_result(self, stage: Stage[Any], key: str) -> Any:
        """The last result of an action with the same key."""
        if stage.gives is None:
            return UNKNOWN
        try:
            values = self._history.last_result(stage.name, key)
            return None if values is None else stage.parse(values)
        except (LookupError, ValueError):  # missing or damaged
            return UNKNOWN

    def _explain_missing(
        self, stage: Stage[Any], key: str, flat: dict[str, Any], names: dict[str, str]
    ) -> tuple[str, ...]:
        last = self._history.last_key(stage.name)
        if last is None:
            return ("it has not run before",)
        before = store.inputs_of(stage.name, last)
        if last == key or before is None:
            return ("its artifact is gone",)
        return tuple(differences(before, flat, names))


def differences(before: Mapping[str, Any], now: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """The changes between two sets of inputs, a phrase each, the recipe's fields first."""
    phrases: dict[int, list[str]] = {0: [], 1: [], 2: []}
    both = before.keys() | now.keys()
    for name in sorted(both):
        old, new = before.get(name), now.get(name)
        # The entries of a mapping that is empty on the other side have phrases of their own.
        if old == new or ({} in (old, new) and any(entry.startswith(f"{name}.") for entry in both)):
            continue
        sort, _, rest = name.partition(".")
        if sort == "code":
            verb = "added" if old is None else "removed" if new is None else "changed"
            phrases[1].append(f"{rest} {verb}")
        elif sort == "library":
            phrases[2].append(f"{rest} {_shorten(old)} → {_shorten(new)}")
        elif sort == "upstream":
            phrases[0].append(f"{names[name]} changed" if name in names else f"{rest} gave something else")
        elif sort in ("metrics", "table") and rest:
            # An added or removed metric is reported as a change of its field.
            if old is not None and new is not None:
                phrases[1].append(f"metric {rest} {_shorten(old)} → {_shorten(new)}")
        elif sort == "files":
            phrases[0].append(f"{names.get(name, rest)} {'is gone' if new is None else 'changed'}")
        else:
            phrases[0].append(f"{names.get(name, name)} {_shorten(old)} → {_shorten(new)}")
    return [phrase for group in phrases.values() for phrase in group]


def _shorten(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "…"
