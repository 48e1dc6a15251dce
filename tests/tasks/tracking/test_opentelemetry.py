"""OpenTelemetry: the trace of a run by OTLP, and a run that no dead collector fails or slows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tasks.cache.stage import Row
from tasks.tracking.run_tracker import RunTracker
from tasks.tracking.tracker import find_by_environment
from tests.fork_server import NEW_PYTHON, ROOT
from tests.post_server import PostServer, post_server
from tests.servers import closed_port

RUN = "5e1cfb2f-e411-4c04-84d8-9099e8ea2870"
KEY = "k" * 40
PROGRAM = "training.programs.fit"


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[PostServer]:
    with post_server() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        yield server


def received(server: PostServer) -> list[Span]:
    """The spans in the order in which they ended."""
    assert {path for path, _ in server.received} <= {"/v1/traces"}
    requests = [ExportTraceServiceRequest.FromString(body) for _, body in server.received]
    scopes = [scope for one in requests for resource in one.resource_spans for scope in resource.scope_spans]
    return [span for scope in scopes for span in scope.spans]


def attributes(of: Any) -> dict[str, Any]:
    """Those of a span or a resource."""
    return {one.key: one.value.string_value or one.value.int_value for one in of.attributes}


def track(*states: str, status: str = "FINISHED", tries: int = 1) -> RunTracker:
    """Tracks a run of the stages fit and score, which end in these states. The program of fit, which an earlier run has
    started an hour ago, is started some times."""
    tracking, now = RunTracker("reviews", RUN), time.time()
    events: list[Any] = [{"time": now - 3600, "kind": "started", "program": PROGRAM, "rank": 0, "pid": 1}]
    for number in range(tries):
        began = now + 10 * number
        events.append({"time": began, "kind": "started", "program": PROGRAM, "rank": 0, "pid": 7 + number})
        events.append({"time": began + 5, "kind": "progress", "done": 1})
    for stage, state in zip(("fit", "score"), states, strict=False):
        tracking.stage_started(stage, KEY)
        tracking.stage_events(stage, events if stage == "fit" else [])
        tracking.stage_ended(Row(stage, KEY, state, 1.5), None)
    tracking.end(status)
    return tracking


def test_a_run_is_a_trace_of_its_stages_and_programs_with_the_id_of_the_flow_run(
    tracked: Path, collector: PostServer
) -> None:
    assert track("ran", "cached", tries=2).warnings == []
    first, second, fit, score, run = received(collector)
    assert [span.name for span in (first, fit, score, run)] == ["fit", "fit", "score", "reviews"]
    assert {span.trace_id for span in received(collector)} == {uuid.UUID(RUN).bytes}
    assert (run.parent_span_id, fit.parent_span_id, score.parent_span_id) == (b"", run.span_id, run.span_id)
    assert first.parent_span_id == second.parent_span_id == fit.span_id
    assert attributes(first) == {"finetune.program": PROGRAM, "finetune.rank": 0, "process.pid": 7}
    assert [attributes(span)["process.pid"] for span in (first, second)] == [7, 8]
    assert [(span.end_time_unix_nano - span.start_time_unix_nano) // 10**6 for span in (first, second)] == [5000, 5000]
    assert attributes(score) == {"finetune.stage": "score", "finetune.key": KEY, "finetune.state": "cached"}
    assert run.start_time_unix_nano <= fit.start_time_unix_nano <= fit.end_time_unix_nano <= run.end_time_unix_nano
    assert {span.status.code for span in received(collector)} == {Status.STATUS_CODE_UNSET}


@pytest.mark.parametrize(
    ("states", "status", "failed"),
    [(["ran", "failed"], "FAILED", {"score", "reviews"}), (["paused"], "KILLED", {"reviews"})],
)
def test_failed_stages_and_runs_are_errors(
    tracked: Path, collector: PostServer, states: list[str], status: str, failed: set[str]
) -> None:
    track(*states, status=status)
    assert {span.name for span in received(collector) if span.status.code == Status.STATUS_CODE_ERROR} == failed


def test_a_resumed_run_sends_the_spans_of_its_own_try(tracked: Path, collector: PostServer) -> None:
    track("failed", status="KILLED")
    collector.received.clear()
    track("resumed")
    assert [attributes(span).get("finetune.state") for span in received(collector)] == [None, "resumed", "finished"]


def test_variables_give_headers_the_name_of_the_service_and_further_attributes(
    tracked: Path, collector: PostServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    track("ran")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=reviews")
    track("ran")
    bodies = [ExportTraceServiceRequest.FromString(body) for _, body in collector.received]
    resources = [attributes(body.resource_spans[0].resource) for body in bodies]
    assert resources[0]["service.name"] == "finetune"
    assert (resources[-1]["service.name"], resources[-1]["team"]) == ("nightly", "reviews")
    assert {headers["api-key"] for headers in collector.headers} == {"secret"}


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:4318"}, False),
    ],
)
def test_the_standard_variables_turn_spans_on_and_off(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], on: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_by_environment() == (["opentelemetry"] if on else [], [])


@pytest.mark.slow
def test_without_a_variable_a_run_imports_no_exporter(tracked: Path) -> None:
    program = f"""
import sys
from tasks.tracking.run_tracker import RunTracker
tracking = RunTracker("reviews", {RUN!r})
tracking.end("FINISHED")
print([name for name in sys.modules if name.startswith(("opentelemetry.exporter", "openlineage"))])
"""
    child = subprocess.run([NEW_PYTHON, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (0, "[]\n"), child.stderr


def test_without_the_package_a_run_has_one_warning(
    tracked: Path, collector: PostServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = "opentelemetry.exporter"
    for name in [name for name in sys.modules if name.startswith(hidden)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, hidden, None)
    (warning,) = track("ran").warnings
    assert warning.endswith("pip install 'finetune-flows[opentelemetry]'.")


@pytest.mark.parametrize("protocol", ["grpc", "carrier pigeon"])
def test_a_protocol_that_cannot_be_sent_is_one_warning(
    tracked: Path, collector: PostServer, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    (warning,) = track("ran").warnings
    assert warning.startswith("OpenTelemetry lacks a part of this run (") and protocol in warning


@pytest.mark.slow
@pytest.mark.parametrize("server", ["refuses", "fails", "is silent"])
def test_a_dead_collector_is_one_warning_and_costs_the_run_seconds_at_its_end(
    tracked: Path,
    collector: PostServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    server: str,
) -> None:
    monkeypatch.setattr("tasks.tracking.opentelemetry.OpenTelemetry.last_wait_s", 2.0)
    collector.answer = 503
    if server == "is silent":
        collector.silent.set()
    if server == "refuses":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://me:secret@127.0.0.1:{closed_port()}")
    began = time.monotonic()
    tracking = track("ran", "ran")
    assert time.monotonic() - began < 20  # each request may take 10 s
    (warning,) = tracking.warnings
    assert warning.startswith("OpenTelemetry lacks a part of this run (") and tracking.trouble is None
    assert "secret" not in warning and capfd.readouterr().err == ""
