"""OpenLineage events: each run, stage and registered version, by OpenLineage's own client.

The client is on if a variable configures its transport: `OPENLINEAGE_URL`, `OPENLINEAGE_CONFIG` (the path of an
openlineage.yml) or `OPENLINEAGE__TRANSPORT…`. A run and a stage are jobs, RECIPE and RECIPE.STAGE; an artifact is a
dataset with the digest as its version. The facts are those of the run's lineage record.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    JobFacet,
    RunFacet,
    column_lineage_dataset,
    data_quality_metrics_dataset,
    dataset_version_dataset,
    error_message_run,
    job_type_job,
    parent_run,
    processing_engine_run,
    schema_dataset,
    tags_dataset,
    tags_run,
    test_run,
)
from openlineage.client.transport.http import HttpTransport

from tasks.cache.results import Lock, Verdict
from tasks.home import without_credentials
from tasks.tracking.tracker import LINEAGE, Tracker
from tasks.tracking.tracker import Run as TrackedRun

NAMESPACE = "OPENLINEAGE_NAMESPACE"
"""The variable that names the namespace of all jobs and artifacts."""
DEFAULT_NAMESPACE = "finetune"
PRODUCER = "urn:finetune-flows"
LISTED_FILES = 100
"""Files of rows that are datasets of their own; of more files, the recipe's path is the dataset."""
HUB = "https://huggingface.co"
SOURCE = "FINETUNE"
"""The source of tags."""
ENDS = {"completed": RunState.COMPLETE, "failed": RunState.FAIL, "interrupted": RunState.ABORT}
STATUSES = {"FINISHED": RunState.COMPLETE, "FAILED": RunState.FAIL, "KILLED": RunState.ABORT}


class OpenLineage(Tracker):
    """Sends the events of a run: starts at once, and the end of each stage with its datasets when the run has written
    its lineage record. No row is sent."""

    title: ClassVar[str] = "OpenLineage"
    remedy: ClassVar[str] = "its events are not sent again"
    replays: ClassVar[bool] = False
    last_wait_s: ClassVar[float] = 5.0
    dead_wait_s: ClassVar[float] = 0.5

    def __init__(self, run: TrackedRun, warn: Callable[[str], None]) -> None:
        super().__init__(run, warn)
        self._client = _Client()
        self._namespace = os.environ.get(NAMESPACE, DEFAULT_NAMESPACE)
        self._sent: set[str] = set()
        self._ends: dict[str, tuple[str, str]] = {}
        """State and time of the end of each stage that has ended."""
        self._parent: str | None = None
        self._record: Mapping[str, Any] = {"recipe": {"name": run.recipe}, "run": {"flow_run_id": run.id}}
        """The run's lineage record; before it is written, the names in it that are known."""
        self._error = ""
        self._time = ""

    def deliver(self, entry: Mapping[str, Any]) -> None:
        """As Tracker. The times of events are those of the entries."""
        self._time = _format_time(entry["time"])
        super().deliver(entry)

    def start(self, name: str | None, parent: str | None) -> None:
        """As Tracker."""
        self._parent = parent
        self._send("run", lambda events: events.of_run(RunState.START, self._time))

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Sends the start of a stage at the tag of its key, and keeps the state that it ends with."""
        for tag, value in values.items():
            stage, _, kind = tag.rpartition(".")
            if kind == "key":
                self._send(stage, partial(_RunEvents.start_stage, stage=stage, time=self._time))
            elif kind == "state" and stage in self._sent:
                self._ends[stage] = value, self._time

    def log_text(self, name: str, content: str) -> None:
        """Sends the ends of stages at the run's lineage record."""
        if name == "problems.json":
            # Their messages may quote rows.
            problems = json.loads(content)
            self._error = f"problems: {len(problems)}, in {', '.join(dict.fromkeys(one['where'] for one in problems))}"
        if name == LINEAGE:
            self._record = json.loads(content)
            for stage in self._record["stages"]:
                self._end_stage(stage)

    def end(self, status: str, time_ms: int) -> None:
        """Sends the ends of the stages that no record has, and of the run."""
        for stage in self._ends:
            self._end_stage({"name": stage})
        run_state = STATUSES[status]
        self._send("end", lambda events: events.of_run(run_state, _format_time(time_ms / 1000), self._error))
        self._client.close(self.last_wait_s)

    def _end_stage(self, stage: Mapping[str, Any]) -> None:
        """At the registration, the record does not have states and times yet."""
        if end := self._ends.get(stage["name"]):
            known = {**stage, "state": end[0], "ended": end[1]}
            self._send(f"{stage['name']} ended", partial(_RunEvents.end_stage, stage=known))

    def _send(self, name: str, build: Callable[[_RunEvents], RunEvent]) -> None:
        if name not in self._sent:
            self._client.emit(build(_RunEvents(self._record, self._namespace, self._parent)))
            self._sent.add(name)


class _Client(OpenLineageClient):
    """OpenLineage's client with three differences, each in a method."""

    @staticmethod
    def _find_yaml_config_path() -> str | None:
        """Reads no openlineage.yml in the working directory: it may have come with rows, and names a server, or a class
        to import."""
        named = os.environ.get("OPENLINEAGE_CONFIG")
        usual = Path.home() / ".openlineage" / "openlineage.yml"
        return named or (str(usual) if usual.is_file() else None)

    def _alias_env_vars(self) -> None:
        """Copies no variable: the client would add the key to the environment of this process under another name."""

    @staticmethod
    def _http_transport_from_env_variables() -> HttpTransport:
        """Does not repeat requests, as the delivery does: the client's waits would delay the end of a run."""
        transport = OpenLineageClient._http_transport_from_env_variables()
        transport.config.retry = {"total": 0}
        return transport


def build_events(record: Mapping[str, Any]) -> Iterator[RunEvent]:
    """The events of an ended run from its lineage record, in order. Raises KeyError for a record without a run."""
    events, run = _RunEvents(record, DEFAULT_NAMESPACE, None), record["run"]
    yield events.of_run(RunState.START, run.get("began") or run["written"])
    for stage in record.get("stages") or []:
        ended = datetime.fromisoformat(stage.get("ended") or run["written"])
        yield events.start_stage(stage["name"], (ended - timedelta(seconds=stage.get("seconds", 0.0))).isoformat())
        yield events.end_stage({**stage, "ended": ended.isoformat()})
    yield events.of_run(ENDS.get(run.get("state", ""), RunState.OTHER), run["written"])


class _RunEvents:
    """Builds events from a run's record, which may have only the names of the recipe and the run yet."""

    def __init__(self, record: Mapping[str, Any], namespace: str, parent: str | None) -> None:
        self._record, self._namespace, self._parent = record, namespace, parent
        self._recipe = str(record["recipe"]["name"])
        self._run_id = _read_uuid(record["run"]["flow_run_id"])

    def of_run(self, state: RunState, time: str, error: str = "") -> RunEvent:
        """The start or the end of the run."""
        parent = None if self._parent is None else _name_parent(_read_uuid(self._parent), self._namespace, self._recipe)
        return self._build(state, time, self._recipe, self._run_id, "FLOW", parent, error)

    def start_stage(self, stage: str, time: str) -> RunEvent:
        """The start of a stage."""
        return self._build_stage(RunState.START, time, stage)

    def end_stage(self, stage: Mapping[str, Any]) -> RunEvent:
        """The end of a stage with its `name`, `state` and `ended`; of a stage of the record, with its datasets too."""
        state = stage.get("state", "")
        event = self._build_stage(_find_end(state, self._record["run"].get("state")), stage["ended"], stage["name"])
        assert event.run.facets is not None
        if state:
            event.run.facets["tags"] = tags_run.TagsRunFacet([tags_run.TagsRunFacetFields("state", state, SOURCE)])
        event.inputs, event.outputs = [*self._list_inputs(stage)], [*self._list_outputs(stage)]
        if stage["name"] == "gate" and (verdict := self._record.get("verdict")):
            event.run.facets["test"] = test_run.TestRunFacet(tests=[*_list_tests(Verdict.model_validate(verdict))])
        return event

    def _build_stage(self, state: RunState, time: str, stage: str) -> RunEvent:
        parent = _name_parent(self._run_id, self._namespace, self._recipe)
        return self._build(state, time, f"{self._recipe}.{stage}", _stage_id(self._run_id, stage), "STAGE", parent)

    def _build(
        self,
        state: RunState,
        time: str,
        job: str,
        run_id: str,
        job_type: str,
        parent: parent_run.ParentRunFacet | None,
        error: str = "",
    ) -> RunEvent:
        facets: dict[str, RunFacet] = {}
        if parent is not None:
            facets["parent"] = parent
        if version := (self._record.get("project") or {}).get("finetune-flows"):
            facets["processing_engine"] = processing_engine_run.ProcessingEngineRunFacet(version, "finetune-flows")
        if error:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(error, "PYTHON")
        of_job: dict[str, JobFacet] = {"jobType": job_type_job.JobTypeJobFacet("BATCH", SOURCE, job_type)}
        return RunEvent(
            eventType=state,
            eventTime=time,
            run=Run(run_id, facets),
            job=Job(self._namespace, job, of_job),
            producer=PRODUCER,
        )

    def _list_inputs(self, stage: Mapping[str, Any]) -> Iterator[InputDataset]:
        made = {one["name"]: one["digest"] for one in self._record.get("stages") or [] if one.get("digest")}
        inputs = stage.get("inputs") or {}
        names = (name.removeprefix("upstream.") for name in inputs if name.startswith("upstream."))
        for name in dict.fromkeys(name.partition("/")[0] for name in names):
            if name in made:
                yield InputDataset(self._namespace, f"{self._recipe}/{name}", facets=_version(made[name]))
        if stage["name"] == "load_data" and "data" in self._record["recipe"]:
            yield from list_sources(self._record)

    def _list_outputs(self, stage: Mapping[str, Any]) -> Iterator[OutputDataset]:
        name, version, verdict = stage["name"], self._record.get("version"), self._record.get("verdict")
        metrics = _list_metrics(self._record.get("metrics") or {})
        if name == "register" and version:
            decision = {"verdict": verdict["decision"]} if verdict else {}
            facets = _version(version["version"]) | _tags(metrics | decision)
            yield OutputDataset("mlflow", version["name"], facets=facets)
        elif stage.get("digest"):
            facets = _version(stage["digest"])
            if name == "load_data" and self._record.get("rows"):
                facets |= _describe_rows(self._record)
            if name == "score":
                facets |= _tags(metrics)
            yield OutputDataset(self._namespace, f"{self._recipe}/{name}", facets=facets)


def _find_end(stage: str, run: str | None) -> RunState:
    """The event for the state of a stage in a run. A skipped or paused stage has not done its work, and neither has one
    during which the run was interrupted."""
    if stage == "failed" and run != "interrupted":
        return RunState.FAIL
    return RunState.ABORT if stage in ("failed", "skipped", "paused") else RunState.COMPLETE


def list_sources(record: Mapping[str, Any]) -> Iterator[InputDataset]:
    """The sources of a run's rows: datasets of the Hub, files, or an object of Python."""
    lock = Lock.model_validate(record.get("lock") or {})
    for section, pinned in lock.by_section(record["recipe"]["data"]):
        path = without_credentials(section["path"])
        files = [file for listed in pinned.files.values() for file in listed]
        if pinned.hub is not None:
            yield InputDataset(HUB, pinned.hub.name.partition("@")[0], facets=_version(pinned.hub.commit))
        elif 0 < len(files) <= LISTED_FILES:
            for file in files:
                yield InputDataset(*_name_file(without_credentials(file.path)), facets=_version(file.sha256))
        elif files:
            yield InputDataset(*_name_file(path))
        else:
            yield InputDataset("python", path, facets=_version(pinned.fingerprint) if pinned.fingerprint else {})


def _name_file(path: str) -> tuple[str, str]:
    """The namespace and the name of a file, as OpenLineage names them."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return "file", path
    host, _, name = rest.partition("/")
    return f"{scheme}://{host}", name


def _describe_rows(record: Mapping[str, Any]) -> dict[str, Any]:
    """Facets of the stored rows: columns, counts, and the columns of the source that they come from."""
    columns: Sequence[Mapping[str, str]] = record["rows"].get("columns") or []
    sources, numbers = [*list_sources(record)], record["rows"].get("figures") or {}
    labels = data_quality_metrics_dataset.ColumnMetrics(distinctCount=numbers.get("labels"))
    fields = {
        column["name"]: column_lineage_dataset.Fields(
            [column_lineage_dataset.InputField(one.namespace, one.name, column["source"]) for one in sources]
        )
        for column in columns
        if column["source"]
    }
    facets: dict[str, Any] = {
        "dataQualityMetrics": data_quality_metrics_dataset.DataQualityMetricsDatasetFacet(
            columnMetrics={column["name"]: labels for column in columns if column["name"] == "label"},
            rowCount=sum(number for name, number in numbers.items() if name.endswith("_rows")),
        )
    }
    if columns:
        listed = [schema_dataset.SchemaDatasetFacetFields(column["name"], column["type"]) for column in columns]
        facets["schema"] = schema_dataset.SchemaDatasetFacet(listed)
    if fields and not record["recipe"]["data"].get("mix"):  # the sets of a mixture may name their columns differently
        facets["columnLineage"] = column_lineage_dataset.ColumnLineageDatasetFacet(fields)
    return facets


def _list_metrics(metrics: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{split}/{name}": str(score["value"])
        for split, scores in metrics.items()
        for name, score in scores.items()
        if score.get("value") is not None
    }


def _list_tests(verdict: Verdict) -> Iterator[test_run.TestExecution]:
    """The checks of the gate, and its decision."""
    decision = "pass" if verdict.decision == "promote" else "fail"
    yield test_run.TestExecution("gate", decision, "error", description=verdict.reason)
    for check in verdict.checks:
        status = "pass" if check.passed else "fail"
        yield test_run.TestExecution(check.figure, status, "error", description=check.inequality)


def _version(version: str) -> dict[str, Any]:
    return {"version": dataset_version_dataset.DatasetVersionDatasetFacet(version)}


def _tags(values: Mapping[str, str]) -> dict[str, Any]:
    fields = [tags_dataset.TagsDatasetFacetFields(name, value, SOURCE) for name, value in values.items()]
    return {"tags": tags_dataset.TagsDatasetFacet(fields)} if fields else {}


def _name_parent(run_id: str, namespace: str, job: str) -> parent_run.ParentRunFacet:
    return parent_run.ParentRunFacet(parent_run.Run(run_id), parent_run.Job(namespace, job))


def _stage_id(run_id: str, stage: str) -> str:
    return str(uuid.uuid5(uuid.UUID(run_id), stage))


def _read_uuid(run: str) -> str:
    """The id of a run, which OpenLineage wants to be a UUID."""
    try:
        return str(uuid.UUID(run))
    except ValueError:
        return str(uuid.uuid5(uuid.NAMESPACE_URL, run))


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
