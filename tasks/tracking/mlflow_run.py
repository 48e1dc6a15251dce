"""MLflow runs: each flow run has one, found by the flow run's id. Their list is that of `finetune runs`."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.home import home, tracking_is_local
from tasks.tracking.connection import (
    FLOW_RUN_TAG,
    cause_of,
    connect,
    find_or_create_run,
    find_unwritable,
    mlflow_errors,
    one_line,
    run_url,
    search_all,
    version_page,
)
from tasks.tracking.logged_models import CONTEXTS, NOTE_TAG, describe_model
from tasks.tracking.outbox import Outbox, find_undelivered, find_undelivered_end, was_killed_here
from tasks.tracking.tracker import (
    JUDGED_TAG,
    STUDY_TAG,
    TRIAL_STATE_TAG,
    TRIAL_TAG,
    VERSION_TAG,
    Curve,
    Point,
    Run,
    Tracker,
    deliver_killed_runs,
)
from training.problems import UserError, nearest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun


SAMPLE_S = 10.0
# MLflow's permanent errors, which a repetition does not mend: a parameter that has another value, an invalid name, a
# deleted run.
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE"}
# Tags that MLflow defines.
NAME_TAG, PARENT_TAG = "mlflow.runName", "mlflow.parentRunId"

_logger = logging.getLogger(__name__)


class Mlflow(Tracker):
    """Shows a run as an MLflow run, which is created if missing.

    MLflow ignores a point that it has, and every other call sets a value: entries may be delivered twice.
    """

    title: ClassVar[str] = "MLflow"
    is_late: ClassVar[bool] = True
    retry_s: ClassVar[float] = 1.0
    remedy: ClassVar[str] = "the next run delivers it"

    def __init__(
        self, run: Run, warn: Callable[[str], None] = _logger.warning, client: MlflowClient | None = None
    ) -> None:
        super().__init__(run, warn)
        self._client = client or connect()
        self.run_id: str | None = None
        self._unreachable: dict[str, Path | None] = {}  # MLflow run -> the folder of its files

    def deliver(self, entry: Mapping[str, Any]) -> None:
        """Calls the method of an entry. One that MLflow refuses is logged and skipped."""
        from mlflow.exceptions import MlflowException

        run_id = self.find_run_id()
        try:
            super().deliver(entry)
        except MlflowException as error:
            self.run_id = None  # a user may have deleted the MLflow run: look it up again
            if error.error_code not in REFUSALS:
                raise
            _logger.warning("MLflow refuses a %s of run %s: %s", entry["entry"], run_id, cause_of(error))

    def find_run_id(self) -> str:
        """Returns the id of the MLflow run, which is created if missing."""
        if self.run_id is None:
            self.run_id = find_or_create_run(self._client, self.run.recipe, self.run.id, self.warn, self.run.began_s)
            self.url = run_url(self.run_id)
        return self.run_id

    def start(self, name: str | None, parent: str | None) -> None:
        """As Tracker."""
        run_id = self.find_run_id()
        self._client.update_run(run_id, status="RUNNING")
        if name:
            self._client.set_tag(run_id, NAME_TAG, name)
        if parent:
            parent_id = find_or_create_run(self._client, self.run.recipe, parent, self.warn, self.run.began_s)
            self._client.set_tag(run_id, PARENT_TAG, parent_id)

    def log_params(self, values: Mapping[str, str]) -> None:
        """As Tracker."""
        from mlflow.entities import Param

        self._log_batches("params", [Param(name, value) for name, value in values.items()], 100)

    def set_tags(self, values: Mapping[str, str]) -> None:
        """As Tracker."""
        from mlflow.entities import RunTag

        self._log_batches("tags", [RunTag(name, value) for name, value in values.items()], 100)

    def describe(self, markdown: str) -> None:
        """MLflow's page of a run shows about three lines without a click."""
        pages = _VERSION.sub(lambda found: f"](#/{version_page(found[1], found[2])})", markdown)
        self.set_tags({NOTE_TAG: pages[:8000]})

    def log_points(self, curve: Curve, points: Sequence[Point]) -> None:
        """As Tracker."""
        from mlflow.entities import Metric

        self._log_batches("metrics", [Metric(*point) for point in points], 1000)

    def log_figures(self, values: Mapping[str, float], time_ms: int) -> None:
        """As Tracker."""
        self.log_points(Curve(), [Point(name, value, time_ms, 0) for name, value in values.items()])

    def log_text(self, name: str, content: str) -> None:
        """As Tracker."""
        if not self._find_unreachable():
            self._client.log_text(self.find_run_id(), content, name)

    def log_file(self, path: Path, folder: str) -> None:
        """As Tracker."""
        if not self._find_unreachable():
            self._client.log_artifact(self.find_run_id(), str(path), folder or None)

    def log_dataset(self, values: Mapping[str, Any]) -> None:
        """As Tracker."""
        self._client.log_inputs(self.find_run_id(), datasets=[_build_dataset(values)])

    def log_model(self, values: Mapping[str, Any]) -> None:
        """As Tracker."""
        describe_model(self._client, self.find_run_id(), self.run.recipe, values)

    def end(self, status: str, time_ms: int) -> None:
        """As Tracker."""
        self._client.set_terminated(self.find_run_id(), status, time_ms)

    def catch_up(self) -> None:
        """Delivers the entries of earlier runs."""
        deliver_killed_runs(lambda outbox: Mlflow(run_of(outbox), self.warn, self._client), except_run=self.run.id)

    def _find_unreachable(self) -> Path | None:
        """The folder of a server's files if this machine does not have it or may not write there: MLflow's client would
        write to this machine's disk, where nobody looks. Warns of it once."""
        run_id = self.find_run_id()
        if run_id not in self._unreachable:
            location = self._client.get_run(run_id).info.artifact_uri.removesuffix(f"/{run_id}/artifacts")
            folder = None if tracking_is_local() else find_unwritable(location)
            self._unreachable[run_id] = folder
            if folder is not None:
                self.warn(
                    f"MLflow has no files of this run: its server keeps them in {folder}, out of reach from here."
                )
        return self._unreachable[run_id]

    def _log_batches(self, kind: str, values: list[Any], at_once: int) -> None:
        """Logs the values in batches. If MLflow refuses a batch, its values are logged one by one."""
        from mlflow.exceptions import MlflowException

        for first in range(0, len(values), at_once):
            batch = values[first : first + at_once]
            try:
                self._client.log_batch(self.find_run_id(), **{kind: batch})
            except MlflowException as error:
                if error.error_code not in REFUSALS:
                    raise
                if len(batch) > 1:
                    self._log_batches(kind, batch, 1)
                else:
                    _logger.warning("MLflow refuses %s of %s: %s", batch[0].key, kind, cause_of(error))


_VERSION = re.compile(r"\]\(models:/([^/)]+)/(\d+)\)")


def run_of(outbox: Outbox) -> Run:
    """The run of an outbox. Raises LookupError or FileNotFoundError if it has not started yet."""
    start = outbox.read_start()
    return Run(outbox.run, start["experiment"], start["time"])


def deliver_earlier_runs() -> str | None:
    """Delivers the remaining entries of earlier runs. Returns the error in one line; None if there is none."""
    if find_undelivered():
        try:
            client = connect()
            deliver_killed_runs(lambda outbox: Mlflow(run_of(outbox), _logger.warning, client))
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
        schema=_describe_columns(home() / entry["source"]),
        profile=json.dumps(entry["profile"]),
    )
    context = CONTEXTS.get(entry["name"], entry["name"])
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _describe_columns(file: Path) -> str | None:
    """The columns of a file of rows, as MLflow's page of a dataset shows them; None if it was removed meanwhile."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as rows:
            columns = pa.ipc.open_file(rows).schema
    except (OSError, pa.ArrowInvalid):
        return None
    listed = [{"name": one.name, "type": str(one.type), "required": not one.nullable} for one in columns]
    return json.dumps({"mlflow_colspec": listed})


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


STATES = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "killed", "RUNNING": "running"}


def list_runs(recipe: str | None, limit: int) -> list[dict[str, Any]]:
    """Lists the last `limit` runs of one recipe, or of all, newest first, as JSON values: ids, `recipe`, `state`,
    `started_ms`, `seconds`, the `judged` figure, `verdict`, `reason`, the registered `version`, and of a sweep its
    `part`: sweep or the trial.

    Raises UserError if the recipe has not run, and MlflowFailed if MLflow does not answer.
    """
    with mlflow_errors():
        client = connect()
        names = {experiment.experiment_id: experiment.name for experiment in search_all(client.search_experiments)}
        chosen = [id for id, name in names.items() if recipe in (None, name)]
        if recipe is not None and not chosen:
            recipes = ", ".join(sorted({*names.values()} - {"Default"})) or "nothing has run yet"
            message = f"no recipe {recipe!r} has run: {recipes}.{nearest(recipe, list(names.values()))}"
            raise UserError.of("registry", "RECIPE", message)
        # Runs that other programs track on the same server have no such tag.
        runs = client.search_runs(
            chosen, f"tags.`{FLOW_RUN_TAG}` LIKE '%'", max_results=limit, order_by=["attributes.start_time DESC"]
        )
        return [_build_row(run, names[run.info.experiment_id]) for run in runs]


def _build_row(run: MlflowRun, recipe: str) -> dict[str, Any]:
    tags, started_ms = run.data.tags, run.info.start_time
    status = run.info.status
    if status == "RUNNING":
        status = find_undelivered_end(tags[FLOW_RUN_TAG]) or status
    state = STATES.get(status, status.lower())
    if state == "running" and was_killed_here(tags[FLOW_RUN_TAG]):
        state = "killed"
    if state == "killed":  # MLflow has no word for a pause
        state = tags.get(TRIAL_STATE_TAG, state)
    ended_ms = run.info.end_time or (int(time.time() * 1000) if state == "running" else None)
    return {
        "flow_run_id": tags[FLOW_RUN_TAG],
        "mlflow_run_id": run.info.run_id,
        "recipe": recipe,
        "part": f"trial {tags[TRIAL_TAG]}" if TRIAL_TAG in tags else "sweep" if STUDY_TAG in tags else None,
        "state": state,
        "started_ms": started_ms,
        "seconds": None if ended_ms is None else (ended_ms - started_ms) / 1000,
        "judged": _read_judged_metric(tags, run.data.metrics),
        "verdict": tags.get("gate.decision"),
        "reason": tags.get("gate.reason"),
        "version": tags.get(VERSION_TAG),
    }


def _read_judged_metric(tags: Mapping[str, str], metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """The figure by which models of the recipe are compared; None if the run has not computed it yet."""
    name = tags.get(JUDGED_TAG, "")
    if f"score/{name}/value" not in metrics:
        return None
    split, _, metric = name.partition("/")
    figures = {part: metrics.get(f"score/{name}/{part}") for part in ("value", "low", "high")}
    return {"split": split, "metric": metric, **figures}
