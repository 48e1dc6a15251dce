"""Stages: a function that fills a folder, and the inputs whose digest names the folder.

This module does not import Prefect: `finetune plan` reads keys without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import TypeAdapter

from tasks.cache.code import code_behind, library_versions, users_code
from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact
from tasks.home import home
from training.jobs.protocol import Event, Progress

Result = TypeVar("Result")


@dataclass(frozen=True)
class Inputs:
    """Everything that can change a stage's output, and nothing else.

    Left out on purpose: paths, names of recipes and registries, log levels, trackers, the runtime.
    """

    values: Mapping[str, Any]
    """Recipe fields, digests of files and of upstream artifacts; JSON values, nested as the recipe nests them."""
    code: Sequence[str] = ()
    """Dotted modules whose code can change the output."""
    outside: Sequence[str] = ()
    """Rooms and modules imported by `code` that cannot change the output with these values."""
    libraries: Sequence[str] = ()
    """Distributions whose version can change the output."""
    named: Mapping[str, str] = field(default_factory=dict)
    """User objects that can change the output, `module:name` by recipe field; names without a colon are ignored."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Display names of inputs by flat name, such as a file's path, which is no input itself."""


class Paused(Exception):
    """Raised by a listener to stop a stage for now: its job keeps its checkpoints, and a later run resumes it."""


class Listener:
    """Follows a run's stages: the terminal, MLflow, Prefect's progress. Each method does nothing by default."""

    def stage_started(self, stage: str, key: str) -> None:
        """The stage is about to be looked up in the store and, if missing, run."""

    def stage_waits(self, stage: str) -> None:
        """Another process is making the same artifact, and this one waits."""

    def stage_events(self, stage: str, events: list[Event]) -> None:
        """A child program wrote these events, in order."""

    def stage_ended(self, row: Row, result: Any) -> None:
        """The stage ended, successfully or not; `result` is an Artifact, another value, or None if it failed."""

    def run_ended(self, result: dict[str, Any]) -> None:
        """The run ended, successfully or not."""


@dataclass(frozen=True)
class Row:
    """One line of a run's table."""

    name: str
    key: str | None
    state: str
    """cached, ran, resumed, skipped, paused or failed."""
    seconds: float
    artifact: str | None = None
    """The artifact's folder, relative to the home."""
    fetched_bytes: int | None = None
    """Downloaded from the shared store for a cached stage; None if the artifact was here."""
    ended: str | None = field(default=None, compare=False)
    """When it ended, as UTC time."""


@dataclass
class Work:
    """The context of a stage's function."""

    key: str
    out: Path
    """The folder to fill."""
    run: str
    """The flow run."""
    listeners: Sequence[Listener] = ()
    stage: str = ""
    earlier: Sequence[Row] = ()
    """The stages of this run that ended before."""
    state: str = "ran"
    """The state of a stage that did not fail: ran, cached, skipped, or resumed after a kill."""
    rollback: Callable[[], str] | None = None
    """Set by an action that changed something: undoes the change if a later stage of the same transaction fails.
    Returns a message for the user."""
    one_at_a_time: Callable[[], AbstractContextManager[None]] = nullcontext
    """A block of an action that machines with a shared store enter one after the other, if their keys are equal."""

    @property
    def job(self) -> Path:
        """The folder of this stage's child program: the same for the same key in every run."""
        return home() / "jobs" / self.key

    def on_events(self, events: list[Event]) -> None:
        """Passes a child's events to the run's listeners."""
        for listener in self.listeners:
            listener.stage_events(self.stage, events)

    def warning(self, message: str) -> None:
        """Warns the user."""
        self.on_events([{"kind": "warning", "message": message}])

    def note(self, message: str) -> None:
        """Tells the user something that needs no action."""
        self.on_events([{"kind": "note", "message": message}])

    def progress(self, done: int, total: int) -> None:
        """Reports the progress of a stage without a child program, in rows."""
        self.on_events([{"kind": "progress", "done": done, "total": total}])

    def fetch_progress(self, done: int, total: int) -> None:
        """Reports the progress of a download, in bytes."""
        self.on_events([fetch_event(done, total)])


def fetch_event(done: int, total: int) -> Progress:
    """The progress of a download, from bytes."""
    return {"kind": "progress", "done": done // 10**6, "total": total // 10**6, "unit": "MB"}


class Builder(Protocol):
    """Builds the stages of a pipeline: the executor runs them, the planner only names them."""

    executes: bool
    """Whether it runs stages. Then several threads may call it."""

    def __call__(self, stage: Stage[Result], *arguments: Any) -> Result:
        """The stage's result: an artifact, or an action's own; in a plan, a placeholder if it is unknown."""

    def transaction(self) -> AbstractContextManager[None]:
        """A context for actions that succeed or fail together: if one fails, those before it are rolled back."""


class Prepared(Protocol):
    """A stage with its arguments: what it depends on, and its work. The `StageJob` of a cached stage is one."""

    def inputs(self) -> Inputs:
        """The content of the key."""

    def run(self, work: Work) -> Any:
        """Does the work and returns its result. A cached stage fills `work.out` too."""


@dataclass(frozen=True)
class Call:
    """A function with its arguments, for an action."""

    make: Callable[..., Any]
    """Gets `Work` and the arguments."""
    given: Callable[..., Inputs]
    """Gets the arguments."""
    arguments: tuple[Any, ...]

    def inputs(self) -> Inputs:
        """The content of the key."""
        return self.given(*self.arguments)

    def run(self, work: Work) -> Any:
        """Returns the function's result."""
        return self.make(work, *self.arguments)


@dataclass(frozen=True)
class Stage(Generic[Result]):
    """One step of a flow. Made by `tasks.jobs.job.stage` and `@action`."""

    name: str
    prepare: Callable[..., Prepared]
    """Gets the recipe and the results of earlier stages."""
    cached: bool
    """Whether the output is an artifact; an action's output is a plain value."""
    read_only: bool = False
    """Whether `plan` may call it, because it changes nothing."""
    gives: Any = None
    """The type of the result, which is in the artifact; of an action, it is stored for later plans. None: any JSON
    values in an artifact, and an action's result is not stored."""
    where: str = ""
    """The condition of a stage that not every run has, as text for a plan."""
    may_repeat: bool = False
    """Whether changed inputs often give the same output, such as rows with other line ends: for a plan."""
    description: str = ""
    """Its work, for the documentation."""
    key_description: str = ""
    """The content of its key, for the documentation."""

    def numbered(self, number: int) -> Stage[Result]:
        """One of several stages with the same work, such as the training of a fold: `fit_fold_2`."""
        return replace(self, name=f"{self.name}_{number}")

    def parse(self, result: Any) -> Any:
        """The result of this stage from stored JSON values. Raises pydantic's ValidationError."""
        return result if self.gives is None else TypeAdapter(self.gives).validate_python(result)

    def open(self, artifact: Artifact) -> Result:
        """The artifact of this cached stage with its result parsed. Raises pydantic's ValidationError."""
        opened: Any = artifact.model_copy(update={"result": self.parse(artifact.result)})
        return opened

    def make(self, work: Work, *arguments: Any) -> Any:
        """Does the stage's work for these arguments: see Prepared.run."""
        return self.prepare(*arguments).run(work)

    def flat_inputs(self, *arguments: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """The inputs for these arguments, as `flatten_inputs` returns them."""
        return self.flatten_inputs(self.prepare(*arguments))

    def flatten_inputs(self, prepared: Prepared) -> tuple[dict[str, Any], dict[str, str]]:
        """The inputs by flat name as JSON values, and their display names. Raises UserError for missing user
        objects."""
        given = prepared.inputs()
        flat = flat_inputs(given) if self.cached else dict(sorted(flatten(given.values)))
        return flat, dict(given.names)

    def key(self, flat: Mapping[str, Any]) -> str:
        """The artifact's name: safe for file systems, without dots."""
        return digest_of({"stage": self.name, "inputs": dict(flat)})[:40]


def flat_inputs(given: Inputs) -> dict[str, Any]:
    """The inputs of a cached stage by flat name as JSON values. Raises UserError for missing user objects."""
    flat = dict(flatten(given.values))
    own, installed = users_code(given.named)
    code = code_behind([*given.code, *own], given.outside)
    for path, digest in code.digests.items():
        flat[f"code.{path}"] = digest
    for library, version in library_versions([*given.libraries, *installed, *code.distributions]).items():
        flat[f"library.{library}"] = version
    return dict(sorted(flat.items()))


def without_number(stage: str) -> str:
    """The name that stages with the same work share: `fit_fold` for `fit_fold_2`."""
    name, _, number = stage.rpartition("_")
    return name if number.isdecimal() else stage


def action(
    inputs: Callable[..., Inputs],
    *,
    read_only: bool = False,
    gives: Any = None,
    where: str = "",
) -> Callable[[Callable[..., Result]], Stage[Result]]:
    """A stage that is not cached: it reads or changes an external system, and can be repeated without harm.

    An equal key means that it would do the same as in the last completed run.
    """

    def decorate(make: Callable[..., Result]) -> Stage[Result]:
        return Stage(
            make.__name__,
            lambda *arguments: Call(make, inputs, arguments),
            cached=False,
            read_only=read_only,
            gives=gives,
            where=where,
            description=inspect.getdoc(make) or "",
            key_description=inspect.getdoc(inputs) or "",
        )

    return decorate


def flatten(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    """Yields the values of nested mappings with dotted names. An empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{above}{name}.")
        else:
            yield above + name, value
