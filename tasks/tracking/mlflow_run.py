"""MLflow runs: each flow run has one, found by the flow run's id; a thread fills it from the run's outbox."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.cache import settings
from tasks.cache.refs import Ref, Verdict, Version
from tasks.cache.stage import Listener, Row
from tasks.tracking.connection import connect, find_or_create_run, find_unwritable, first_line, one_line, run_url
from tasks.tracking.outbox import Outbox, find_undelivered
from tasks.tracking.reports import format_check_name, read_slice_figures
from training.jobs.protocol import EVENTS, read_events

RETRY_S = 1.0
LAST_RETRY_S = 0.5
SAMPLE_S = 10.0
LOAD_WAIT_S = 1.0
# How long an ended run waits for the last delivery: while MLflow answers, and after a delivery failed.
LAST_WAIT_S = 30.0
DEAD_WAIT_S = 3.0
# Files that people read are logged to MLflow; weights and tables of rows stay in the store.
SHOWN = {".json", ".csv", ".png", ".jsonl", ".log", ".yaml", ".txt"}
MAX_SHOWN_BYTES = 20_000_000
# MLflow's permanent errors, which a repetition does not mend: a parameter that has another value, an invalid name, a
# deleted run.
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE"}

# Tags of a run: the figure by which its model is judged, `split/metric`, and its version in the registry.
JUDGED_TAG = "finetune.judged"
VERSION_TAG = "register.version"
# Tags of a sweep's run and of its trials: the study, the number of the trial, and its state at the end of its run.
STUDY_TAG, TRIAL_TAG, TRIAL_STATE_TAG = "sweep.study", "sweep.trial", "sweep.state"
# Tags that MLflow defines.
NAME_TAG, NOTE_TAG, PARENT_TAG = "mlflow.runName", "mlflow.note.content", "mlflow.parentRunId"

_logger = logging.getLogger(__name__)


class Tracker(Listener):
    """Tracks a run in MLflow.

    Args:
        experiment: MLflow experiment, the recipe's name.
        run: the flow run's id.
        name: name of the MLflow run; by default the experiment and the end of the flow run's id.
        parent: the id of the flow run whose MLflow run has this one as a child.
    """

    def __init__(self, experiment: str, run: str, name: str | None = None, parent: str | None = None) -> None:
        self.mlflow_run_id: str | None = None
        self.trouble: str | None = None
        """The error of the last delivery; None if it succeeded."""
        self.warnings: list[str] = []
        """Changes in MLflow that the user should know of, such as a restored experiment."""
        self.lost = False
        """Whether a full disk lost the last entries, the run's end among them; set by `end`."""
        self._curves: set[str] = set()
        self._outbox = Outbox(run)
        self.folder = self._outbox.folder
        """The folder of the run's outbox."""
        # Held until the end: otherwise other commands would treat the run as killed and start it twice.
        self._claim = self._outbox.claim_run(math.inf, self._warn_of_waiting)
        self._claim.__enter__()
        self._earlier: dict[str, str] = {}  # the tags of earlier tries of the run
        now = time.time()
        starts = [now]
        for entry in self._outbox.read_entries("start", "tags"):
            self._earlier |= entry.get("values", {})
            starts += [entry["time"]] if entry["entry"] == "start" else []
        self._began = min(starts)
        self._outbox.put("start", time=now, experiment=experiment, **({"parent": parent} if parent else {}))
        if name:
            self.set_tags({NAME_TAG: name})
        self._ended = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(
            target=settings.with_this_home(self._deliver_until_ended), name="mlflow-delivery", daemon=True
        )
        self._thread.start()
        self._sampling_ended = threading.Event()
        self._sampler = threading.Thread(
            target=sample_system_metrics, args=(self._log_sample, self._sampling_ended), daemon=True
        )
        self._sampler.start()

    @property
    def url(self) -> str | None:
        """The address of the MLflow run's page; None before the run exists, or without a server."""
        return run_url(self.mlflow_run_id)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Logs the recipe's fields by dotted name."""
        self._outbox.put("params", values={name: str(value)[:6000] for name, value in values.items()})

    def log_text(self, name: str, content: str) -> None:
        """Logs a small text file, kept with the run."""
        self._outbox.put("text", name=name, content=content)

    def log_points(self, values: Mapping[str, float], step: int) -> None:
        """Logs a point of each curve, with the time of the run's first start: a resumed run logs the same point."""
        began = int(self._began * 1000)
        self._outbox.put("metrics", points=[[name, value, began, step] for name, value in values.items()])

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Sets tags of the MLflow run."""
        self._outbox.put("tags", values={name: str(value)[:8000] for name, value in values.items()})

    def stage_started(self, stage: str, key: str) -> None:
        """Tags the run with the stage's key."""
        self.set_tags({f"{stage}.key": key})

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        """Logs a child program's metrics as STAGE/name and its speed as STAGE/speed/name, with the times of the
        events."""
        prefixes = {"metrics": stage, "speed": f"{stage}/speed"}
        points = [
            [f"{prefixes[event['kind']]}/{name}", value, int(event["time"] * 1000), event["step"]]
            for event in events
            if event["kind"] in prefixes
            for name, value in event["values"].items()
        ]
        if points:
            self._curves.update(point[0] for point in points)
            self._outbox.put("metrics", points=points)

    def stage_ended(self, row: Row, result: Any) -> None:
        """Logs the stage's state, figures and files. Curves of a cached stage are read from its artifact. A result that
        an earlier try of the run has logged adds no figures."""
        self.set_tags({f"{row.name}.state": row.state})
        figures, logged = {"seconds": row.seconds}, {}
        if isinstance(result, Ref):
            logged = {f"{row.name}.digest": result.digest}
            figures |= dict(_flatten_numbers(result.figures))
            figures |= read_slice_figures(result.path) if row.name == "score" else {}
            self._log_artifact(result, row)
        if isinstance(result, Verdict):
            logged = {f"{row.name}.decision": result.decision, f"{row.name}.reason": result.reason}
            self.log_text(f"{row.name}/verdict.json", result.model_dump_json(indent=1))
            figures |= {format_check_name(check): check.value for check in result.checks}
        if isinstance(result, Version):
            logged = {VERSION_TAG: f"{result.name}/{result.version}"}
        if logged and logged.items() <= self._earlier.items():
            return
        now = int(time.time() * 1000)
        points = [[f"{row.name}/{name}", value, now, 0] for name, value in figures.items()]
        # The final figure of a curve is left out: it would be one more point of the curve.
        self._outbox.put("metrics", points=[point for point in points if point[0] not in self._curves])
        if logged:
            self.set_tags(logged)  # last: it says that the rest is logged

    def end(self, status: str) -> None:
        """Ends the MLflow run (FINISHED, FAILED or KILLED) and waits for the last delivery, at most LAST_WAIT_S."""
        self._sampling_ended.set()
        self._sampler.join(LOAD_WAIT_S)  # a sample that is being taken is logged before the end
        self._outbox.put("end", status=status)
        self._ended.set()
        deadline = time.monotonic() + (DEAD_WAIT_S if self.trouble else LAST_WAIT_S)
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.1)
            if self.trouble:
                deadline = min(deadline, time.monotonic() + DEAD_WAIT_S)
        if self._thread.is_alive() and self.trouble is None:
            self.trouble = f"it did not answer within {LAST_WAIT_S:g} s"
        self.lost = bool(self._outbox.unwritten)
        self._given_up.set()
        if not self._thread.is_alive() and self.trouble is None:
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
        with contextlib.suppress(LookupError, FileNotFoundError):  # a full disk has not taken the start yet
            step = int(now - self._outbox.read_start()["time"])
            points = [[f"system/{name}", value, int(now * 1000), step] for name, value in figures.items()]
            self._outbox.put("metrics", points=points)

    def _log_artifact(self, ref: Ref, row: Row) -> None:
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
            self._outbox.put("dataset", name="data", digest=ref.digest[:36], source=ref.location, profile=ref.figures)

    def log_file(self, path: Path, to: str) -> None:
        """Logs a file of the home into a folder of the run's files."""
        self._outbox.put("file", path=path.relative_to(settings.home()).as_posix(), to=to)

    def _deliver_until_ended(self) -> None:
        delivery: Delivery | None = None
        killed_runs_wait = True
        while True:
            last, delivered = self._ended.wait(RETRY_S if delivery or self.trouble else 0), False
            try:
                delivery = delivery or Delivery(self.warnings.append)
                with self._outbox.claim_delivery() as claimed:
                    if claimed:
                        delivery.deliver(self._outbox)
                delivered = claimed  # otherwise another command is delivering this run's earlier entries
                self.mlflow_run_id = delivery.find_run_id(self._outbox)
                if killed_runs_wait:
                    delivery.deliver_killed_runs(except_run=self._outbox.run)
                    killed_runs_wait = False
                self.trouble = None
            except Exception as error:  # no error of MLflow ends the run: the entries wait
                self.trouble = one_line(error)
            if last and ((delivered and self.trouble is None) or self._given_up.wait(LAST_RETRY_S)):
                return


class Delivery:
    """Delivery of entries from outboxes to MLflow. Errors of MLflow's client are raised."""

    def __init__(self, warn: Callable[[str], None] = _logger.warning) -> None:
        self._client = connect()
        self._warn = warn
        self._runs: dict[str, str] = {}  # flow run -> MLflow run
        self._unreachable: dict[str, Path | None] = {}  # MLflow run -> the folder of its files

    def deliver(self, outbox: Outbox) -> None:
        """Delivers the undelivered entries in order, and marks each as delivered. An entry that MLflow refuses is
        logged and skipped."""
        from mlflow.exceptions import MlflowException

        for entry, offset in outbox.read_undelivered():
            run_id = self.find_run_id(outbox)
            try:
                if entry["entry"] == "end" and outbox.is_open():
                    continue  # the run has started again
                self._deliver(entry, run_id)
            except MlflowException as error:
                del self._runs[outbox.run]  # a user may have deleted the MLflow run: look it up again
                if error.error_code not in REFUSALS:
                    raise
                _logger.warning("MLflow refuses a %s of run %s: %s", entry["entry"], run_id, first_line(error))
            outbox.mark_delivered(offset, ended=entry["entry"] == "end")

    def deliver_killed_runs(self, except_run: str = "") -> None:
        """Ends killed runs as KILLED, and delivers their entries and those of ended runs. Raises the first error after
        it has tried them all."""
        errors: list[Exception] = []
        for outbox in find_undelivered(except_run):
            with outbox.claim_delivery() as claimed:
                if not claimed or not outbox.end_if_killed():
                    continue
                try:
                    self.deliver(outbox)
                    with outbox.claim_run() as run_claimed:
                        if run_claimed:
                            outbox.trim()
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def find_run_id(self, outbox: Outbox) -> str:
        """Returns the id of the outbox's MLflow run, which is created if missing."""
        if outbox.run not in self._runs:
            start = outbox.read_start()
            self._runs[outbox.run] = find_or_create_run(
                self._client, start["experiment"], outbox.run, self._warn, start["time"]
            )
        return self._runs[outbox.run]

    def _deliver(self, entry: dict[str, Any], run_id: str) -> None:
        from mlflow.entities import Metric, Param, RunTag

        kind = entry["entry"]
        if kind == "start":
            self._client.update_run(run_id, status="RUNNING")
            if parent := entry.get("parent"):
                parent_id = find_or_create_run(self._client, entry["experiment"], parent, self._warn, entry["time"])
                self._client.set_tag(run_id, PARENT_TAG, parent_id)
        elif kind == "params":
            self._log_batches(run_id, "params", [Param(name, value) for name, value in entry["values"].items()], 100)
        elif kind == "tags":
            self._log_batches(run_id, "tags", [RunTag(name, value) for name, value in entry["values"].items()], 100)
        elif kind == "metrics":
            self._log_batches(run_id, "metrics", [Metric(*point) for point in entry["points"]], 1000)
        elif kind in ("file", "text") and self._find_unreachable(run_id):
            pass  # MLflow's client would write to this machine's disk, where nobody looks
        elif kind == "file":
            path = settings.home() / entry["path"]
            if path.is_file():
                self._client.log_artifact(run_id, str(path), entry["to"] or None)
        elif kind == "text":
            self._client.log_text(run_id, entry["content"], entry["name"])
        elif kind == "dataset":
            self._client.log_inputs(run_id, datasets=[_build_dataset(entry)])
        elif kind == "end":
            self._client.set_terminated(run_id, entry["status"], int(entry["time"] * 1000))

    def _find_unreachable(self, run_id: str) -> Path | None:
        """The folder of a server's files if this machine does not have it or may not write there. Warns of it once."""
        if run_id not in self._unreachable:
            location = self._client.get_run(run_id).info.artifact_uri.removesuffix(f"/{run_id}/artifacts")
            folder = None if settings.tracking_is_local() else find_unwritable(location)
            self._unreachable[run_id] = folder
            if folder is not None:
                self._warn(
                    f"MLflow has no files of this run: its server keeps them in {folder}, out of reach from here."
                )
        return self._unreachable[run_id]

    def _log_batches(self, run_id: str, kind: str, values: list[Any], at_once: int) -> None:
        """Logs the values in batches. If MLflow refuses a batch, its values are logged one by one."""
        from mlflow.exceptions import MlflowException

        for first in range(0, len(values), at_once):
            batch = values[first : first + at_once]
            try:
                self._client.log_batch(run_id, **{kind: batch})
            except MlflowException as error:
                if error.error_code not in REFUSALS:
                    raise
                if len(batch) > 1:
                    self._log_batches(run_id, kind, batch, 1)
                else:
                    _logger.warning("MLflow refuses %s of %s: %s", batch[0].key, kind, first_line(error))


def deliver_earlier_runs() -> str | None:
    """Delivers the remaining entries of earlier runs. Returns the error in one line; None if there is none."""
    if find_undelivered():
        try:
            Delivery().deliver_killed_runs()
        except Exception as error:
            return one_line(error)
    return None


def _build_dataset(entry: Mapping[str, Any]) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=entry["name"],
        digest=entry["digest"],
        source_type="local",
        source=json.dumps({"uri": entry["source"]}),
        profile=json.dumps(entry["profile"]),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def _flatten_numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flatten_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


def sample_system_metrics(on_sample: Callable[[dict[str, float]], None], ended: threading.Event) -> None:
    """Calls `on_sample` with the machine's load (processor, memory, disk, network, GPU) every ten seconds until `ended`
    is set."""
    # MLflow's own monitor sends each sample to the server, and stops for good if the server does not answer.
    monitors: list[Any] = []
    while not ended.wait(SAMPLE_S):
        monitors = monitors or _create_monitors()
        figures: dict[str, float] = {}
        for monitor in monitors:
            monitor.collect_metrics()
            figures |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        on_sample(figures)


def _create_monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with contextlib.suppress(Exception):  # any type of error on a machine without an NVIDIA GPU or its library
        monitors.append(GPUMonitor())
    return monitors
