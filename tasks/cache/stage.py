"""What a stage is: a function that fills a folder, and the inputs that name the folder.

No Prefect here: `plan` and the check that nothing changed read keys without importing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from tasks.cache import settings
from tasks.cache.code import code_behind, library_versions, users_code
from tasks.cache.digests import digest_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Inputs:
    """All that can change a stage's output, and nothing else.

    Left out on purpose: where things lie, names of recipes and registries, log levels, trackers, the runtime.
    """

    values: Mapping[str, Any]
    """Recipe fields, digests of files and of upstream artifacts; JSON values, nested as the recipe nests them."""
    code: Sequence[str] = ()
    """Dotted modules whose code shapes the output, besides the stage's own."""
    outside: Sequence[str] = ()
    """Rooms and modules that `code` imports, and that cannot change the output with these values."""
    libraries: Sequence[str] = ()
    """Distributions whose version shapes the output."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Objects of the user's that shape the output, `module:name` by the recipe's field; other words are passed over."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What to call an input when it changed, by its flat name: a file's path, which is no input itself."""


class Listener:
    """Follows a run's stages: the terminal, MLflow, Prefect's progress. Each method does nothing by default."""

    def stage_started(self, stage: str, key: str) -> None:
        """The stage is about to be looked up in the store and, if missing, run."""

    def stage_waits(self, stage: str) -> None:
        """Another process makes the same artifact; this one waits for it."""

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        """A child program wrote these events, in order."""

    def stage_ended(self, row: Row, result: Any) -> None:
        """The stage ended, successfully or not; `result` is a Ref, another value, or None if it failed."""

    def run_ended(self, result: dict[str, Any]) -> None:
        """The run ended, successfully or not."""


@dataclass(frozen=True)
class Row:
    """One line of a run's table."""

    name: str
    key: str | None
    state: str
    """cached, ran, resumed, skipped or failed."""
    seconds: float
    artifact: str | None = None
    """The artifact's folder, relative to the home."""


@dataclass
class Work:
    """What a stage's function is given beside its arguments."""

    key: str
    out: Path
    """The folder to fill."""
    run: str
    """The flow run."""
    listeners: Sequence[Listener] = ()
    stage: str = ""
    state: str = "ran"
    """What the table says of a stage that did not fail: ran, cached, skipped, or resumed after a kill."""
    rollback: Callable[[], str] | None = None
    """Set by an action that changed something: undoes the change if a later stage of the same `Driver.together` fails.
    Returns a message for the user."""

    @property
    def job(self) -> Path:
        """Where a child program of this stage works: the same folder for the same key, in whichever run."""
        return settings.home() / "jobs" / self.key

    def on_events(self, events: list[dict[str, Any]]) -> None:
        """Passes a child's events to the run's listeners."""
        for listener in self.listeners:
            listener.stage_events(self.stage, events)

    def progress(self, done: int, total: int) -> None:
        """Shows how far a stage without a child program is, in rows."""
        self.on_events([{"kind": "progress", "done": done, "total": total}])


class Driver(Protocol):
    """Goes over a composition of stages: runs them, or only looks."""

    def __call__(self, stage: Stage[Any], *arguments: Any) -> Any:
        """The stage's result, or what is known of it."""

    def together(self) -> AbstractContextManager[None]:
        """Around actions of which all are done, or none: where one fails, those before it take back what they did."""


@dataclass(frozen=True)
class Stage(Generic[Result]):
    """One step of a flow. Made by `@stage` and `@action`."""

    name: str
    make: Callable[..., Any]
    inputs: Callable[..., Inputs]
    cached: bool
    """Whether the output is an artifact; an action's output is a plain value."""
    read_only: bool = False
    """Whether `plan` may call it: it reads, and acts on nothing."""
    gives: type[BaseModel] | None = None
    """What an action returns where it does not return None: remembered, for a plan that finds it would do the same."""
    where: str = ""
    """Where it is run at all, if not always: for a plan that cannot tell yet."""
    may_repeat: bool = False
    """Whether changed inputs may well give the same output, as rows with other line ends do: for a plan."""

    def flat_inputs(self, *arguments: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Inputs under flat names, JSON values; and what to call them. Raises UserError for
        objects of the user's that are nowhere."""
        given = self.inputs(*arguments)
        flat = dict(flatten(given.values))
        if self.cached:
            own, installed = users_code(given.named)
            code = code_behind([self.make.__module__, *given.code, *own], given.outside)
            for path, digest in code.digests.items():
                flat[f"code.{path}"] = digest
            for library, version in library_versions([*given.libraries, *installed, *code.distributions]).items():
                flat[f"library.{library}"] = version
        return dict(sorted(flat.items())), dict(given.names)

    def key(self, flat: Mapping[str, Any]) -> str:
        """The artifact's name: safe for file systems, without dots."""
        return digest_of({"stage": self.name, "inputs": dict(flat)})[:40]


def stage(
    inputs: Callable[..., Inputs], *, name: str | None = None, where: str = "", may_repeat: bool = False
) -> Callable[[Callable[..., Mapping[str, Any]]], Stage[Any]]:
    """A cached stage. The function takes `Work` and the arguments, fills `work.out`, and returns a few figures."""

    def decorate(make: Callable[..., Mapping[str, Any]]) -> Stage[Any]:
        return Stage(name or make.__name__, make, inputs, cached=True, where=where, may_repeat=may_repeat)

    return decorate


def action(
    inputs: Callable[..., Inputs],
    *,
    read_only: bool = False,
    gives: type[BaseModel] | None = None,
    where: str = "",
) -> Callable[[Callable[..., Result]], Stage[Result]]:
    """A stage that is not cached: it looks at the outside world or acts on it, and can be repeated without harm.

    Its key says whether it would do again what the last completed run did.
    """

    def decorate(make: Callable[..., Result]) -> Stage[Result]:
        return Stage(make.__name__, make, inputs, cached=False, read_only=read_only, gives=gives, where=where)

    return decorate


def flatten(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    """Yields the values of nested mappings with dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{above}{name}.")
        else:
            yield above + name, value
