"""The tracking of a run: a listener that writes what trackers show into the run's outbox. A thread for each tracker
delivers the entries."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from tasks.cache.results import Artifact, Check, Verdict, Version
from tasks.cache.stage import Listener, Row
from tasks.home import home, with_this_home
from tasks.reports.model_reports import read_slices
from tasks.tracking.connection import FIT_TAG, MODEL_TAG, REASON_TAG, VERDICT_TAG, one_line
from tasks.tracking.mlflow_run import Mlflow, sample_system_metrics
from tasks.tracking.outbox import Outbox
from tasks.tracking.tracker import VERSION_TAG, Curve, Delivery, Run, Tracker, find_by_environment, load
from training.data.ipc_files import SPLITS
from training.jobs.protocol import EVENTS, Event, read_events

LAST_RETRY_S = 0.5
POLL_S = 1.0
LOAD_WAIT_S = 1.0
# How long an ended run waits for the last delivery: while a service answers, and after a delivery failed.
LAST_WAIT_S = 30.0
DEAD_WAIT_S = 3.0
# Files that people read are tracked; weights and tables of rows stay in the store.
SHOWN = {".json", ".csv", ".png", ".jsonl", ".log", ".yaml", ".txt"}
MAX_SHOWN_BYTES = 20_000_000

ROWS = ".arrow"
DIGEST_LENGTH = 36  # characters of a dataset's digest in MLflow

TRACKED_GROUPS = 20  # of a slice, the largest
GROUP_LENGTH = 100  # characters of a group's name in MLflow

_logger = logging.getLogger(__name__)


class RunTracker(Listener):
    """Tracks a run in MLflow, and in the trackers of its recipe.

    Args:
        recipe: its name, MLflow's experiment.
        run: the flow run's id.
        name: of the run on the trackers' pages; by default the recipe and the end of the flow run's id.
        parent: the flow run that this one belongs to.
        report_to: trackers besides MLflow.
    """

    def __init__(
        self,
        recipe: str,
        run: str,
        name: str | None = None,
        parent: str | None = None,
        report_to: Sequence[str] = (),
    ) -> None:
        self.warnings: list[str] = []
        """Changes that the user should know of, such as a restored experiment."""
        self._outbox = Outbox(run)
        # Held until the end: otherwise other commands would treat the run as killed and start it twice.
        self._claim = self._outbox.claim_run(math.inf, self._warn_of_waiting)
        self._claim.__enter__()
        self._keys: dict[str, str] = {}
        self._programs: dict[str, list[dict[str, Any]]] = {}  # of stages that are running, as log_programs gets them
        self._earlier: dict[str, str] = {}  # the tags of earlier tries of the run
        self._points: dict[str, set[int]] = {}  # the steps of each curve, of all tries
        self._model: dict[str, Any] = {"version": None, "rows": {}, "tags": {}}  # what log_model gets
        now = time.time()
        starts = [now]
        for entry in self._outbox.read_entries("start", "tags", "metrics"):
            if entry["entry"] == "start":
                starts.append(entry["time"])
            elif entry["entry"] == "tags":
                self._earlier |= entry["values"]
            else:
                self._select_new(entry["points"])
        self._began_s, self._started_s = min(starts), now
        names = {key: value for key, value in (("name", name), ("parent", parent)) if value}
        self._outbox.put("start", time=now, experiment=recipe, **names)
        identity = Run(run, recipe, self._began_s, now)
        by_environment, missing = find_by_environment()
        self.warnings += missing
        make: list[Callable[[], type[Tracker]]] = [lambda: Mlflow]
        make += [partial(load, name) for name in (*report_to, *by_environment)]
        self._deliveries = [_DeliveryThread(self._outbox, identity, one, self.warnings.append) for one in make]
        for delivery in self._deliveries:
            delivery.start()
        self._sampling_ended = threading.Event()
        self._sampler = threading.Thread(
            target=sample_system_metrics, args=(self._log_sample, self._sampling_ended), daemon=True
        )
        self._sampler.start()

    @property
    def mlflow_run_id(self) -> str | None:
        """The id of the MLflow run; None before it exists."""
        mlflow = self._deliveries[0].tracker
        return mlflow.run_id if isinstance(mlflow, Mlflow) else None

    @property
    def pages(self) -> dict[str, str]:
        """The addresses of the run's pages that are known, by the title of the tracker."""
        trackers = (delivery.tracker for delivery in self._deliveries)
        return {tracker.title: tracker.url for tracker in trackers if tracker and tracker.url}

    @property
    def trouble(self) -> str | None:
        """The error of the last delivery to MLflow; None if it succeeded."""
        return self._deliveries[0].trouble

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Logs the recipe's fields by dotted name."""
        self._outbox.put("params", values={name: str(value)[:6000] for name, value in values.items()})

    def log_text(self, name: str, content: str) -> None:
        """Logs a small text file, kept with the run."""
        self._outbox.put("text", name=name, content=content)

    def log_points(self, values: Mapping[str, float], step: int) -> None:
        """Logs a point of each curve, with the time of the run's first start: a resumed run logs the same point."""
        began_ms = int(self._began_s * 1000)
        self._put_points(Curve(), [[name, value, began_ms, step] for name, value in values.items()])

    def log_file(self, path: Path, to: str) -> None:
        """Logs a file of the home into a folder of the run's files."""
        self._outbox.put("file", path=path.relative_to(home()).as_posix(), to=to)

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Sets short texts by name."""
        self._outbox.put("tags", values={name: str(value)[:8000] for name, value in values.items()})

    def describe(self, markdown: str) -> None:
        """Sets the description of the run. `models:/NAME/VERSION` is the address of a registered version."""
        self._outbox.put("note", content=markdown)

    def stage_started(self, stage: str, key: str) -> None:
        """Tags the run with the stage's key."""
        self._keys[stage] = key
        self.set_tags({f"{stage}.key": key})

    def stage_events(self, stage: str, events: list[Event]) -> None:
        """Logs a child program's metrics as STAGE/name and its speed as STAGE/speed/name, with the times of the
        events."""
        points: list[list[Any]] = []
        for event in events:
            if event["kind"] == "metrics" or event["kind"] == "speed":
                prefix = stage if event["kind"] == "metrics" else f"{stage}/speed"
                place = int(event["time"] * 1000), event["step"]
                points += [[f"{prefix}/{name}", value, *place] for name, value in event["values"].items()]
            self._follow_programs(stage, event)
        self._put_points(Curve(stage, self._keys.get(stage, "")), points)

    def stage_ended(self, row: Row, result: Any) -> None:
        """Logs the stage's state, numbers and files. Curves of a cached stage are read from its artifact. A result that
        an earlier try of the run has logged adds no numbers."""
        if programs := self._programs.pop(row.name, []):
            self._outbox.put("programs", stage=row.name, programs=programs)
        self.set_tags({f"{row.name}.state": row.state})
        self._follow_model(row.name, result)
        numbers, logged = {"seconds": row.seconds}, {}
        if isinstance(result, Artifact):
            logged = {f"{row.name}.digest": result.digest}
            numbers |= dict(_flatten_numbers(to_jsonable_python(result.result)))
            numbers |= read_slice_metrics(result.path) if row.name == "score" else {}
            self._log_artifact(result, row)
        if isinstance(result, Verdict):
            logged = {f"{row.name}.decision": result.decision, f"{row.name}.reason": result.reason}
            self.log_text(f"{row.name}/verdict.json", result.model_dump_json(indent=1))
            numbers |= {format_check_name(check): check.value for check in result.checks}
        if isinstance(result, Version):
            logged = {VERSION_TAG: f"{result.name}/{result.version}"}
        if logged and logged.items() <= self._earlier.items():
            return
        # The final number of a curve is left out: it would be one more point of the curve.
        named = {f"{row.name}/{name}": value for name, value in numbers.items()}
        self._outbox.put("figures", values={name: value for name, value in named.items() if name not in self._points})
        if isinstance(result, Version):
            self._outbox.put("model", **self._model)
        if logged:
            self.set_tags(logged)  # last: it says that the rest is logged

    def end(self, status: str) -> None:
        """Ends the run (FINISHED, FAILED or KILLED) and waits for the last delivery, at most LAST_WAIT_S."""
        self._sampling_ended.set()
        self._sampler.join(LOAD_WAIT_S)  # a sample that is being taken is logged before the end
        if status == "FINISHED" and "digest" in self._model and self._model["version"] is None:
            self._outbox.put("model", **self._model)
        self._outbox.put("end", status=status)
        for delivery in self._deliveries:
            delivery.ended.set()
        ended_at = time.monotonic()
        for delivery in self._deliveries:
            delivery.finish(ended_at)
        if self._outbox.unwritten:
            self.warnings.append(
                f"MLflow lacks the end of this run for good: {self._outbox.folder} was not writable, and its data is "
                "lost."
            )
        else:
            self.warnings += [delivery.describe_trouble() for delivery in self._deliveries if delivery.trouble]
            if all(delivery.is_complete for delivery in self._deliveries if delivery.replays):
                with contextlib.suppress(OSError), self._outbox.claim_delivery() as claimed:
                    if claimed:
                        self._outbox.trim()
        self.close()

    def close(self) -> None:
        """Releases the run, so that other processes can resume it. A second call does nothing."""
        self._claim.__exit__(None, None, None)

    def _warn_of_waiting(self) -> None:
        _logger.warning("flow run %s is running in another process of this home: waiting for its end", self._outbox.run)

    def _log_sample(self, figures: dict[str, float]) -> None:
        # Steps are seconds since the run's first start, so they increase across retries.
        now = time.time()
        points = [
            [f"system/{name}", value, int(now * 1000), int(now - self._began_s)] for name, value in figures.items()
        ]
        self._put_points(Curve(), points)

    def _put_points(self, curve: Curve, points: list[list[Any]]) -> None:
        """Adds the points that the run does not have yet: a job that is resumed begins with its earlier events."""
        if new := self._select_new(points):
            self._outbox.put("metrics", **{name: value for name, value in curve._asdict().items() if value}, points=new)

    def _select_new(self, points: Iterable[list[Any]]) -> list[list[Any]]:
        new = []
        for point in points:
            steps = self._points.setdefault(point[0], set())
            if point[3] not in steps:
                steps.add(point[3])
                new.append(point)
        return new

    def _follow_programs(self, stage: str, event: Event) -> None:
        """Keeps the times of processes that this try of the run has started: a job that is resumed begins with the
        events of earlier ones."""
        programs, time_s = self._programs.setdefault(stage, []), event.get("time", 0.0)
        if event["kind"] == "started" and time_s >= self._started_s:
            started = {"program": event["program"], "rank": event["rank"], "pid": event["pid"]}
            programs.append({**started, "began": time_s, "ended": time_s})
        latest = {program["rank"]: program for program in programs}  # earlier ones of a rank have ended
        for program in latest.values():
            program["ended"] = max(program["ended"], time_s)

    def _log_artifact(self, ref: Artifact, row: Row) -> None:
        events = ref.path / "log" / EVENTS
        if row.state == "cached" and events.is_file():
            self.stage_events(row.name, read_events(events, 0, ["metrics", "speed"])[0])
        files = [*ref.path.glob("*.*"), *(ref.path / "log").rglob("*.*")]
        for path in files:
            shown = path.is_file() and path.suffix in SHOWN and path.stat().st_size <= MAX_SHOWN_BYTES
            if shown and path.name != "manifest.json":
                folders = path.parent.relative_to(ref.path).parts
                self.log_file(path, "/".join([row.name, *(folder for folder in folders if folder != "log")]))
        if row.name == "load_data":
            counts = to_jsonable_python(ref.result, exclude_none=True)
            for split, digest in self._model["rows"].items():
                profile = {"num_rows": counts.get(f"{split}_rows")}
                source = f"{ref.location}/{split}{ROWS}"
                self._outbox.put("dataset", name=split, digest=digest, source=source, profile=profile)

    def _follow_model(self, stage: str, result: Any) -> None:
        """Keeps what `log_model` gets from the results of stages."""
        if isinstance(result, Artifact) and stage == "load_data":
            files = {split: result.parts.get(f"{split}{ROWS}") for split in SPLITS}
            self._model["rows"] = {split: digest[:DIGEST_LENGTH] for split, digest in files.items() if digest}
        elif isinstance(result, Artifact) and stage == "fit":
            digest = result.parts.get("model", result.digest)
            self._model |= {"digest": digest, "step": _find_exported_step(result)}
            self._model["tags"] |= {MODEL_TAG: digest, FIT_TAG: result.key}
        elif isinstance(result, Verdict):
            self._model["tags"] |= {VERDICT_TAG: result.decision, REASON_TAG: result.reason}
        elif isinstance(result, Version):
            self._model["version"] = f"{result.name}/{result.version}"


def _find_exported_step(fit: Artifact) -> int:
    """The step of the checkpoint whose weights were exported."""
    numbers = to_jsonable_python(fit.result)
    with contextlib.suppress(OSError, ValueError):
        if json.loads((fit.path / "inputs.json").read_bytes()).get("training.load_best_model_at_end"):
            return int(numbers.get("best_step") or numbers.get("steps", 0))
    return int(numbers.get("steps", 0))


class _DeliveryThread(threading.Thread):
    """Delivers the entries of the run to one tracker until the run has ended."""

    def __init__(
        self, outbox: Outbox, run: Run, load_type: Callable[[], type[Tracker]], warn: Callable[[str], None]
    ) -> None:
        super().__init__(name="delivery", daemon=True, target=with_this_home(self._deliver_until_ended))
        self._outbox, self._run, self._load_type, self._warn = outbox, run, load_type, warn
        self.tracker: Tracker | None = None
        self.trouble: str | None = None
        """The error of the last delivery; None if it succeeded."""
        self.ended = threading.Event()
        self._given_up = threading.Event()
        self._title, self._remedy = "MLflow", ""
        self._type: type[Tracker] = Tracker

    @property
    def replays(self) -> bool:
        """As Tracker."""
        return self._type.replays

    @property
    def _last_wait_s(self) -> float:
        return min(LAST_WAIT_S, self._type.last_wait_s)

    @property
    def _dead_wait_s(self) -> float:
        return min(DEAD_WAIT_S, self._type.dead_wait_s)

    @property
    def is_complete(self) -> bool:
        """Whether the tracker has all entries."""
        return not self.is_alive() and self.trouble is None

    def finish(self, ended_at: float) -> None:
        """Waits for the last delivery of a run that ended at this time, in seconds of the monotonic clock."""
        deadline = ended_at + (self._dead_wait_s if self.trouble else self._last_wait_s)
        while self.is_alive() and time.monotonic() < deadline:
            self.join(0.1)
            deadline = min(deadline, ended_at + self._last_wait_s)  # of a tracker that has been imported meanwhile
            if self.trouble:
                deadline = min(deadline, time.monotonic() + self._dead_wait_s)
        if self.is_alive() and self.trouble is None:
            self.trouble = f"it did not answer within {self._last_wait_s:g} s"
        self._given_up.set()

    def describe_trouble(self) -> str:
        """The warning about entries that were not delivered."""
        return f"{self._title} lacks a part of this run ({self.trouble}); {self._remedy}."

    def _deliver_until_ended(self) -> None:
        delivery: Delivery | None = None
        is_behind, retry_s = True, 0.0
        while True:
            last, delivered = self.ended.wait(retry_s), False
            try:
                delivery = delivery or self._open()
                retry_s = delivery.tracker.retry_s
                claim = self._outbox.claim_delivery() if delivery.tracker.is_late else contextlib.nullcontext(True)
                with claim as claimed:
                    if claimed:
                        delivery.deliver()
                delivered = claimed  # otherwise another command is delivering this run's earlier entries
                if is_behind:
                    delivery.tracker.catch_up()
                    is_behind = False
                self.trouble, retry_s = None, POLL_S
            except Exception as error:  # no error of a tracker ends the run
                self.trouble, retry_s = one_line(error), retry_s or POLL_S
            if last and ((delivered and self.trouble is None) or self._given_up.wait(LAST_RETRY_S)):
                return

    def _open(self) -> Delivery:
        self._type = self._load_type()
        self._title, self._remedy = self._type.title, self._type.remedy
        self.tracker = self._type(self._run, self._warn)
        return Delivery(self._outbox, self.tracker)


def _flatten_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


def read_slice_metrics(scores: Path) -> dict[str, float]:
    """Metrics of the largest groups of each slice, by `SPLIT/SLICE:GROUP/METRIC`, a name that MLflow accepts."""
    return {
        f"{split}/{format_group_name(name + '=' + group['group'])}/{metric}": score["value"]
        for split, slices in read_slices(scores).items()
        for name, groups in slices.items()
        for group in sorted(groups, key=lambda group: -group["rows"])[:TRACKED_GROUPS]
        for metric, score in group["metrics"].items()
        if score["value"] is not None
    }


def format_check_name(check: Check) -> str:
    """The name of a check's figure in MLflow."""
    if check.group is None:
        return check.figure.replace(".", "/")
    split, metric = check.figure.split(f".{check.group}.")
    return f"{split}/{format_group_name(check.group)}/{metric}"


def format_group_name(group: str) -> str:
    """`SLICE:GROUP` for `SLICE=GROUP`. MLflow accepts letters, digits and `_-.: `; a name with other characters, or a
    long one, is changed and ends with a digest of the original."""
    name = group.replace("=", ":", 1)
    plain = re.sub(r"[^\w.\-: ]", "_", name)[:GROUP_LENGTH]
    return plain if plain == name else f"{plain}_{hashlib.sha256(group.encode()).hexdigest()[:8]}"
