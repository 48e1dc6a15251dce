"""Trackers that environment variables turn on, in a whole run."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.flows.forked import finetune
from tests.flows.small import FinishedRun
from tests.post_server import post_server


@pytest.mark.slow
def test_a_run_sends_openlineages_events_and_opentelemetrys_spans_of_all_of_its_stages(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home, out = shutil.copytree(finished.home, tmp_path / "home", symlinks=True), tmp_path / "out.json"
    with post_server() as receiver:
        on = {"OPENLINEAGE_URL": receiver.url, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
        run = finetune(home, "run", str(finished.file), "--force", "score", "--json", str(out), **server, **on)
        assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    assert not any("lacks a part" in warning for warning in result["warnings"])
    events = [json.loads(body) for path, body in receiver.received if path == "/api/v1/lineage"]
    bodies = [ExportTraceServiceRequest.FromString(body) for path, body in receiver.received if path == "/v1/traces"]
    spans = [span for body in bodies for span in body.resource_spans[0].scope_spans[0].spans]
    flow_run, states = result["flow_run_id"], {stage["name"]: stage["state"] for stage in result["stages"]}
    assert {span.trace_id for span in spans} == {uuid.UUID(flow_run).bytes}

    names = {span.span_id: span.name for span in spans}
    assert {span.name for span in spans if names.get(span.parent_span_id) == "small"} == {*states}
    assert [span.name for span in spans if names.get(span.parent_span_id) == "score"] == ["score"], "its program"

    last = {event["job"]["name"].removeprefix("small."): event for event in events}
    assert {*last} == {*states, "small"} and last["small"]["run"]["runId"] == flow_run
    assert {name for name, event in last.items() if event["eventType"] != "COMPLETE"} == {
        name for name, state in states.items() if state == "skipped"
    }
    assert {(one["namespace"], Path(one["name"]).name) for one in last["load_data"]["inputs"]} == {
        ("file", "train.csv"),
        ("file", "validation.csv"),
    }
