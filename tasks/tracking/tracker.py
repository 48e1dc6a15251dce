"""Trackers: a tracker shows a run in one service. It gets the entries of the run's outbox, in order.

    start            the flow run, when it starts, and again when it is resumed
    params           the recipe's fields
    tags             keys and states of stages, verdict, version
    note             a description with links, as Markdown
    metrics          points of curves: training and evaluation by step, speed, the machine's load
    figures          the numbers of a stage that has ended, such as the scores
    text, file       recipe, reports, pictures, logs
    programs         the processes of a stage that has ended
    dataset          the rows of a split
    model            the exported model, when it is registered, or at the end of a run that registers none
    end              the state of the run

A new tracker is a module with a subclass of Tracker and its line in training/recipe/tables/trackers.py, or in
BY_ENVIRONMENT if environment variables turn it on.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tasks.home import home
from tasks.tracking.outbox import Outbox, find_undelivered
from training.recipe.tables.trackers import TRACKERS

# Tags of a run: the figure by which its model is judged, `split/metric`, and its version in the registry.
JUDGED_TAG = "finetune.judged"
VERSION_TAG = "register.version"
# Tags of a sweep's run and of its trials: the study, the number of the trial, and its state at the end of its run.
STUDY_TAG, TRIAL_TAG, TRIAL_STATE_TAG = "sweep.study", "sweep.trial", "sweep.state"


RECIPE, LINEAGE = "recipe.yaml", "lineage.json"
"""The names of the texts that are the recipe and the lineage record."""


class Run(NamedTuple):
    """A flow run, as its first entry names it."""

    id: str
    recipe: str
    began_s: float
    """The time of its first start."""
    started_s: float = 0.0
    """The time of its last start; a resumed run has several."""


class Curve(NamedTuple):
    """The source of points: the job of a stage, or the run itself (both empty)."""

    stage: str = ""
    key: str = ""
    """The key of the stage: runs with the same key train the same model, and resume each other's jobs."""


class Point(NamedTuple):
    """A value of a curve."""

    name: str
    value: float
    time_ms: int
    step: int


class Tracker:
    """Shows one run in a service, in a thread of its own: a slow one delays nothing but the end of the run.

    A method that raises is called again later with the same values. Each point comes once, however often the run is
    killed and resumed in this home; a new run with the same key begins with all points of its job. Methods that a
    service has no use for are inherited: they do nothing.
    """

    title: ClassVar[str]
    """The name of the service, for messages."""
    is_late: ClassVar[bool] = False
    """Whether entries wait until the service answers, for the next run if need be. Otherwise each process begins with
    the run's first entry, and the remaining ones are dropped at its end."""
    replays: ClassVar[bool] = True
    """Whether a resumed run delivers the entries of its earlier tries again; otherwise it begins with its own."""
    last_wait_s: ClassVar[float] = math.inf
    """How long an ended run waits for the last delivery while the service answers, at most as long as for MLflow."""
    dead_wait_s: ClassVar[float] = math.inf
    """The same after a delivery failed."""
    retry_s: ClassVar[float] = 10.0
    """The time after which a failed delivery is tried again."""
    remedy: ClassVar[str] = "the next run with the same training draws it again"
    """The end of the warning about a run that the service lacks a part of."""

    def __init__(self, run: Run, warn: Callable[[str], None]) -> None:
        self.run, self.warn = run, warn
        self.url: str | None = None
        """The address of the run's page; None before there is one, or without a server."""

    def start(self, name: str | None, parent: str | None) -> None:
        """The run starts, or is resumed. `parent`: the flow run of its sweep."""

    def log_params(self, values: Mapping[str, str]) -> None:
        """The recipe's fields by dotted name."""

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Short texts by name; a later one replaces an earlier one."""

    def describe(self, markdown: str) -> None:
        """The run's description. `models:/NAME/VERSION` is the address of a registered version in it."""

    def log_points(self, curve: Curve, points: Sequence[Point]) -> None:
        """Points of curves, in the order in which they were recorded."""

    def log_figures(self, values: Mapping[str, float], time_ms: int) -> None:
        """The numbers of a stage that has ended, by `STAGE/name`; later values replace earlier ones."""

    def log_text(self, name: str, content: str) -> None:
        """A small text file."""

    def log_file(self, path: Path, folder: str) -> None:
        """A file of the home, for a folder of the run's files."""

    def log_programs(self, stage: str, programs: Sequence[Mapping[str, Any]]) -> None:
        """The processes of programs that a stage has started, each with `program`, `rank`, `pid`, and the times `began`
        and `ended` of its first and last event. They come before the state of the stage."""

    def log_dataset(self, values: Mapping[str, Any]) -> None:
        """The rows of a split: its name, and the digest, the source and the profile of its rows."""

    def log_model(self, values: Mapping[str, Any]) -> None:
        """The exported model, after its metrics: `version`, NAME/NUMBER, or None, `digest`, `step` of its checkpoint,
        `tags`, and `rows`, the digest of each split's rows."""

    def end(self, status: str, time_ms: int) -> None:
        """The run has ended: FINISHED, FAILED or KILLED."""

    def catch_up(self) -> None:
        """Called once, after the first delivery: for what earlier runs left."""

    def deliver(self, entry: Mapping[str, Any]) -> None:
        """Calls the method of an entry."""
        kind, time_ms = entry["entry"], int(entry["time"] * 1000)
        if kind == "start":
            self.start(entry.get("name"), entry.get("parent"))
        elif kind == "params":
            self.log_params(entry["values"])
        elif kind == "tags":
            self.set_tags(entry["values"])
        elif kind == "note":
            self.describe(entry["content"])
        elif kind == "metrics":
            curve = Curve(entry.get("stage", ""), entry.get("key", ""))
            self.log_points(curve, [Point(*point) for point in entry["points"]])
        elif kind == "figures":
            self.log_figures(entry["values"], time_ms)
        elif kind == "text":
            self.log_text(entry["name"], entry["content"])
        elif kind == "file":
            path = home() / entry["path"]
            if path.is_file():
                self.log_file(path, entry["to"])
        elif kind == "programs":
            self.log_programs(entry["stage"], entry["programs"])
        elif kind == "dataset":
            self.log_dataset(entry)
        elif kind == "model":
            self.log_model(entry)
        elif kind == "end":
            self.end(entry["status"], time_ms)


class ByEnvironment(NamedTuple):
    """A tracker that environment variables turn on."""

    tracker: str
    """`module:class`, imported only if the tracker is on."""
    package: str
    """The module that it needs, by the name under which Python imports it."""
    extra: str
    """The extra of this project that installs it."""
    is_on: Callable[[Mapping[str, str]], bool]
    """Gets the environment."""


def _openlineage_is_on(environment: Mapping[str, str]) -> bool:
    variables = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG", "OPENLINEAGE__TRANSPORT")
    is_disabled = environment.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true"
    return not is_disabled and any(name.startswith(variables) and value for name, value in environment.items())


def _opentelemetry_is_on(environment: Mapping[str, str]) -> bool:
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if exporters := environment.get("OTEL_TRACES_EXPORTER"):
        return "otlp" in (one.strip() for one in exporters.split(","))
    return any(environment.get(name) for name in endpoints)


BY_ENVIRONMENT: dict[str, ByEnvironment] = {
    "openlineage": ByEnvironment(
        "tasks.tracking.openlineage:OpenLineage", "openlineage.client", "openlineage", _openlineage_is_on
    ),
    "opentelemetry": ByEnvironment(
        "tasks.tracking.opentelemetry:OpenTelemetry",
        "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry",
        _opentelemetry_is_on,
    ),
}


def find_by_environment() -> tuple[list[str], list[str]]:
    """The trackers that the environment turns on, and warnings about those whose package is missing."""
    on, warnings = [], []
    for name, entry in BY_ENVIRONMENT.items():
        if entry.is_on(os.environ):
            if _is_installed(entry.package):
                on.append(name)
            else:
                install = f"pip install 'finetune-flows[{entry.extra}]'"
                warnings.append(f"The environment turns on {name}, whose package is not installed: {install}.")
    return on, warnings


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def load(name: str) -> type[Tracker]:
    """The class of a tracker of `training.report_to`, or of one that the environment turns on."""
    entry = BY_ENVIRONMENT[name] if name in BY_ENVIRONMENT else TRACKERS[name]
    module, _, attribute = entry.tracker.partition(":")
    found: type[Tracker] = getattr(importlib.import_module(module), attribute)
    return found


class Delivery:
    """Delivery of the entries of an outbox to a tracker. Errors of the tracker are raised."""

    def __init__(self, outbox: Outbox, tracker: Tracker) -> None:
        self._outbox, self.tracker = outbox, tracker
        self._offset = 0

    def deliver(self) -> None:
        """Delivers the remaining entries in order. Of a late tracker, each is marked as delivered."""
        is_late = self.tracker.is_late
        entries = self._outbox.read_undelivered() if is_late else self._outbox.read_from(self._offset)
        for index, (entry, offset) in enumerate(entries, 1):
            is_end = entry["entry"] == "end"
            if is_end and (index < len(entries) or self._outbox.is_open()):
                continue  # the run has started again
            if self.tracker.replays or entry["time"] >= self.tracker.run.started_s:
                self.tracker.deliver(entry)
            self._offset = offset
            if is_late:
                self._outbox.mark_delivered(offset, ended=is_end)


def deliver_killed_runs(open_tracker: Callable[[Outbox], Tracker], except_run: str = "") -> None:
    """Ends killed runs of this home as KILLED, and delivers their entries and those of ended runs. Raises the first
    error after it has tried them all."""
    errors: list[Exception] = []
    for outbox in find_undelivered(except_run):
        with outbox.claim_delivery() as claimed:
            if not claimed or not outbox.end_if_killed():
                continue
            try:
                Delivery(outbox, open_tracker(outbox)).deliver()
                with outbox.claim_run() as run_claimed:
                    if run_claimed:
                        outbox.trim()
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]
