"""OpenTelemetry: a run, its stages and their programs as spans of a trace, sent by OTLP.

Spans are sent if OpenTelemetry's own variables name a receiver, such as `OTEL_EXPORTER_OTLP_ENDPOINT`. Its SDK reads
these variables: headers, time-outs, certificates, sampling, attributes of the resource. The trace id is the flow run's.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from tasks.home import without_credentials
from tasks.tracking.tracker import Run, Tracker

EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
"""The modules with `OTLPSpanExporter` by `OTEL_EXPORTER_OTLP_PROTOCOL`."""
NAME = "finetune"
"""The name of the service, unless a variable gives another one."""

# The exporters log each request that they repeat. The run's warning says that spans are missing.
logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)


class OpenTelemetry(Tracker):
    """Sends the span of each stage, with those of its programs, when the stage ends, and the run's at its end."""

    title: ClassVar[str] = "OpenTelemetry"
    remedy: ClassVar[str] = "its spans are not sent again"
    replays: ClassVar[bool] = False
    last_wait_s: ClassVar[float] = 5.0
    dead_wait_s: ClassVar[float] = 0.5

    def __init__(self, run: Run, warn: Callable[[str], None]) -> None:
        super().__init__(run, warn)
        self._exporter, self._ended = _load_exporter(), _EndedSpans()
        # Not the global one: Prefect and MLflow would send spans of their own through it.
        provider = TracerProvider(resource=_build_resource(), id_generator=_IdsOfRun(run.id), shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(NAME)
        self._run_span: Span | None = None
        self._stages: dict[str, Span] = {}
        """The spans of the stages that are running."""
        self._time_ns = 0

    def deliver(self, entry: Mapping[str, Any]) -> None:
        """As Tracker. The times of spans are those of the entries."""
        self._time_ns = _to_ns(entry["time"])
        super().deliver(entry)
        if entry["entry"] in ("tags", "end"):
            self._send()

    def start(self, name: str | None, parent: str | None) -> None:
        """As Tracker."""
        attributes = {"finetune.recipe": self.run.recipe, "finetune.flow_run": self.run.id}
        if parent:
            attributes["finetune.sweep"] = parent
        self._run_span = self._tracer.start_span(self.run.recipe, attributes=attributes, start_time=self._time_ns)

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Starts a stage's span at the tag of its key, and ends it at the tag of its state."""
        for tag, value in values.items():
            stage, _, kind = tag.rpartition(".")
            if kind == "key":
                if stage not in self._stages:
                    self._stages[stage] = self._start(stage, self._run_span, self._time_ns, {"finetune.stage": stage})
                self._stages[stage].set_attribute("finetune.key", value)
            elif kind == "state" and stage in self._stages:
                self._end(self._stages.pop(stage), value, value == "failed")

    def log_programs(self, stage: str, programs: Sequence[Mapping[str, Any]]) -> None:
        """Adds a span for each program of a stage that is about to end."""
        for program in programs:
            attributes = {
                "finetune.program": program["program"],
                "finetune.rank": program["rank"],
                "process.pid": program["pid"],
            }
            name = program["program"].rpartition(".")[2]
            span = self._start(name, self._stages.get(stage), _to_ns(program["began"]), attributes)
            span.end(_to_ns(program["ended"]))

    def end(self, status: str, time_ms: int) -> None:
        """Ends the spans that are left."""
        for stage in [*self._stages]:
            self._end(self._stages.pop(stage), "interrupted", True)
        if self._run_span is not None:
            self._end(self._run_span, status.lower(), status != "FINISHED")
            self._run_span = None

    def _start(self, name: str, parent: Span | None, time_ns: int, attributes: Mapping[str, Any]) -> Span:
        context = None if parent is None else set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=attributes, start_time=time_ns)

    def _end(self, span: Span, state: str, has_failed: bool) -> None:
        span.set_attribute("finetune.state", state)
        if has_failed:
            span.set_status(Status(StatusCode.ERROR, state))
        span.end(self._time_ns)

    def _send(self) -> None:
        """Sends the ended spans. Raises ConnectionError if the receiver did not take them."""
        if self._ended.spans and self._exporter.export(self._ended.spans) is not SpanExportResult.SUCCESS:
            raise ConnectionError(f"{_find_endpoint()} took no spans")
        self._ended.spans.clear()


class _EndedSpans(SpanProcessor):
    """Keeps the spans that have ended until they are sent."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self.spans.append(span)


class _IdsOfRun(RandomIdGenerator):
    """The trace id of a run is the UUID of its flow run, so that the run's other records lead to the trace."""

    def __init__(self, run: str) -> None:
        try:
            self._trace_id = uuid.UUID(run).int
        except ValueError:
            self._trace_id = int.from_bytes(hashlib.sha256(run.encode()).digest()[:16])

    def generate_trace_id(self) -> int:
        return self._trace_id


def _load_exporter() -> SpanExporter:
    """The exporter of the protocol that the variables name. Raises ValueError for an unknown one, and ImportError."""
    variables = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = next((value for name in variables if (value := os.environ.get(name))), "http/protobuf")
    if protocol not in EXPORTERS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: it may be {' or '.join(EXPORTERS)}")
    exporter: SpanExporter = importlib.import_module(EXPORTERS[protocol]).OTLPSpanExporter()
    return exporter


def _find_endpoint() -> str:
    variables = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
    return without_credentials(next((value for name in variables if (value := os.environ.get(name))), "localhost"))


def _build_resource() -> Resource:
    """The resource of the variables, by default with the name of this project."""
    found = Resource.create()
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: NAME}))
    return found


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)
