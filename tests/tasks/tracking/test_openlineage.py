"""OpenLineage: events of a run by the client's own configuration, and a run that no dead server fails or slows."""

from __future__ import annotations

import enum
import functools
import importlib
import json
import os
import pkgutil
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attr
import pyarrow as pa
import pytest
from openlineage.client import generated
from openlineage.client.generated.base import RunEvent

from tasks.cache.results import Artifact, Check, Lock, PinnedFile, Verdict, Version
from tasks.cache.stage import Row
from tasks.registry import lineage
from tasks.tracking.openlineage import build_events
from tasks.tracking.outbox import Outbox
from tasks.tracking.run_tracker import RunTracker
from tasks.tracking.tracker import find_by_environment
from tests.arrow import write_arrow
from tests.made import LABELS, artifact
from tests.post_server import PostServer, post_server
from tests.servers import closed_port
from training.recipe import Recipe, parse

RUN = "5e1cfb2f-e411-4c04-84d8-9099e8ea2870"
BASE = {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}}
SCORES = {"test": {"accuracy": {"value": 0.8, "low": 0.7, "high": 0.9}}}
VERDICT = Verdict(
    decision="promote",
    reason="it reaches every minimum.",
    checks=[Check(figure="test.accuracy", value=0.8, minimum=0.7)],
)


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE")]:
        monkeypatch.delenv(name)


def recipe() -> Recipe:
    data = {"source": "csv", "path": "/rows", "text": ["review"], "label": "stars"}
    return parse({"name": "reviews", "task": "sequence-classification", "data": data, "model": BASE})


def record(state: str = "completed", path: str = "/rows/train.csv") -> dict[str, Any]:
    """The lineage record of a run that has registered its model."""
    folder = lineage.home() / "runs" / RUN
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(data_files={"train": [PinnedFile(path=path, sha256="e" * 64)]})
    (folder / "lock.json").write_text(lock.model_dump_json())
    numbers = {"train_rows": 120, "test_rows": 9, "labels": 2, "warnings": 0}
    rows = artifact("load_data", {"labels.json": LABELS}, numbers)
    write_arrow(rows.path / "train.arrow", pa.table({"text": ["a film"], "label": [0]}))
    made = {"upstream.load_data/train.arrow": "d" * 64}
    artifacts: list[Artifact] = [rows, artifact("fit", {"model/config.json": b"{}"}, {}, made)]
    artifacts.append(artifact("score", {"metrics.json": b"{}"}, SCORES, {"upstream.fit/model": "f" * 64}))
    ended = "2026-11-27T00:00:09.000+00:00"
    listed = [Row(one.stage, one.key, "ran", 1.5, one.location, ended=ended) for one in artifacts]
    listed += [Row(stage, "k" * 40, "ran", 0.1, ended=ended) for stage in ("gate", "register")]
    listed.append(Row("publish", "k" * 40, "skipped" if state == "completed" else "failed", 0.1, ended=ended))
    version = Version(name="reviews", version="3")
    return lineage.build_record(recipe(), RUN, listed, mlflow_run=None, verdict=VERDICT, version=version, state=state)


def received(server: PostServer) -> list[dict[str, Any]]:
    """The events, which are valid."""
    assert {path for path, _ in server.received} <= {"/api/v1/lineage"}
    events = [json.loads(body) for _, body in server.received]
    for event in events:
        validate(RunEvent, event)
    return events


def ends(events: list[dict[str, Any]]) -> dict[str, str]:
    """The last event of each job."""
    return {event["job"]["name"]: event["eventType"] for event in events}


def track(
    *stages: tuple[str, str], status: str = "FINISHED", log: Callable[[RunTracker], None] = lambda tracking: None
) -> RunTracker:
    """Tracks a run with these stages and their states to its end."""
    tracking = RunTracker("reviews", RUN)
    for stage, state in stages or [("fit", "ran")]:
        tracking.stage_started(stage, "k" * 40)
        tracking.stage_ended(Row(stage, "k" * 40, state, 1.5), None)
    log(tracking)
    tracking.end(status)
    return tracking


def with_record(state: str = "completed") -> Callable[[RunTracker], None]:
    return lambda tracking: tracking.log_text("lineage.json", json.dumps(record(state)))


def test_a_run_sends_the_events_of_its_stages_and_of_its_version_to_the_server_of_the_variable(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = ("load_data", "fit", "score", "gate", "register")
    with post_server() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", server.url)
        monkeypatch.setenv("OPENLINEAGE_API_KEY", "secret")
        assert track(*((stage, "ran") for stage in stages), log=with_record()).warnings == []
        assert [name for name, value in os.environ.items() if "secret" in value] == ["OPENLINEAGE_API_KEY"]
        events, (*_, headers) = received(server), server.headers
    assert headers["Authorization"] == "Bearer secret"
    assert [(event["eventType"], event["job"]["name"]) for event in events] == [
        ("START", "reviews"),
        *(("START", f"reviews.{stage}") for stage in stages),
        *(("COMPLETE", f"reviews.{stage}") for stage in stages),
        ("COMPLETE", "reviews"),
    ]
    assert {event["run"]["runId"] for event in events if event["job"]["name"] == "reviews"} == {RUN}
    assert {event["run"]["facets"]["parent"]["run"]["runId"] for event in events[1:-1]} == {RUN}
    assert events[-2]["outputs"][0]["name"] == "reviews"


def test_stages_that_were_skipped_paused_or_interrupted_are_not_complete(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with post_server() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", server.url)
        track(("fit", "cached"), ("publish", "skipped"), log=with_record())
        assert ends(received(server)) == {
            "reviews": "COMPLETE", "reviews.fit": "COMPLETE", "reviews.publish": "ABORT",
        }  # fmt: skip
        tags = received(server)[-2]["run"]["facets"]["tags"]["tags"]
        assert {"key": "state", "value": "skipped", "source": "FINETUNE"} in tags
        server.received.clear()
        track(("fit", "ran"), ("publish", "failed"), status="KILLED", log=with_record("interrupted"))
        assert ends(received(server)) == {"reviews": "ABORT", "reviews.fit": "COMPLETE", "reviews.publish": "ABORT"}
        server.received.clear()
        track(("fit", "ran"), ("publish", "failed"), status="FAILED", log=with_record("failed"))
        assert ends(received(server)) == {"reviews": "FAIL", "reviews.fit": "COMPLETE", "reviews.publish": "FAIL"}


def test_a_run_without_a_record_such_as_a_trial_sends_the_ends_of_its_stages_without_datasets(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with post_server() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", server.url)
        track(("load_data", "cached"), ("fit", "paused"), status="KILLED")
        assert ends(received(server)) == {"reviews": "ABORT", "reviews.load_data": "COMPLETE", "reviews.fit": "ABORT"}


def test_a_resumed_run_sends_its_own_events_and_not_those_of_its_earlier_try_again(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with post_server() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", server.url)
        track(("fit", "failed"), status="KILLED", log=with_record("interrupted"))
        server.received.clear()
        track(("fit", "resumed"), log=with_record())
        assert [(event["eventType"], event["job"]["name"]) for event in received(server)] == [
            ("START", "reviews"), ("START", "reviews.fit"), ("COMPLETE", "reviews.fit"), ("COMPLETE", "reviews"),
        ]  # fmt: skip


def test_events_have_the_facets_of_rows_models_metrics_and_the_gate(home: Path) -> None:
    from openlineage.client.serde import Serde

    events = {
        (event["eventType"], event["job"]["name"].rpartition(".")[2]): event
        for event in map(Serde.to_dict, build_events(record()))
    }
    for event in events.values():
        validate(RunEvent, event)
    loaded = events["COMPLETE", "load_data"]
    (source,), (rows,) = loaded["inputs"], loaded["outputs"]
    assert (source["namespace"], source["name"]) == ("file", "/rows/train.csv")
    assert source["facets"]["version"]["datasetVersion"] == "e" * 64
    assert [(one["name"], one["type"]) for one in rows["facets"]["schema"]["fields"]] == [
        ("text", "string"),
        ("label", "int64"),
    ]
    assert rows["facets"]["dataQualityMetrics"]["rowCount"] == 129
    assert rows["facets"]["dataQualityMetrics"]["columnMetrics"]["label"]["distinctCount"] == 2
    (origin,) = rows["facets"]["columnLineage"]["fields"]["label"]["inputFields"]
    assert (origin["namespace"], origin["name"], origin["field"]) == ("file", "/rows/train.csv", "stars")
    assert [one["name"] for one in events["COMPLETE", "fit"]["inputs"]] == ["reviews/load_data"]
    tests = events["COMPLETE", "gate"]["run"]["facets"]["test"]["tests"]
    assert [(one["name"], one["status"]) for one in tests] == [("gate", "pass"), ("test.accuracy", "pass")]
    (version,) = events["COMPLETE", "register"]["outputs"]
    assert (version["namespace"], version["name"]) == ("mlflow", "reviews")
    assert version["facets"]["version"]["datasetVersion"] == "3"
    assert {one["key"]: one["value"] for one in version["facets"]["tags"]["tags"]} == {
        "test/accuracy": "0.8",
        "verdict": "promote",
    }
    start, end = events["START", "fit"]["eventTime"], events["COMPLETE", "fit"]["eventTime"]
    assert (start, end) == ("2026-11-27T00:00:07.500000+00:00", "2026-11-27T00:00:09+00:00")


def test_names_of_files_have_no_credentials_even_if_the_record_has_them(home: Path) -> None:
    found = record()
    found["lock"]["data_files"]["train"][0]["path"] = "https://me:secret@rows.example/train.csv"
    events = [*build_events(found)]
    assert "secret" not in str(events) and ("https://rows.example", "train.csv") in [
        (one.namespace, one.name) for event in events for one in event.inputs or []
    ]


def test_events_go_to_the_file_that_the_clients_configuration_names(
    tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events.jsonl"
    config = tmp_path / "named.yml"
    config.write_text(json.dumps({"transport": {"type": "file", "log_file_path": str(file), "append": True}}))
    monkeypatch.setenv("OPENLINEAGE_CONFIG", str(config))
    assert track().warnings == []
    assert [json.loads(line)["eventType"] for line in file.read_text().splitlines()][-1] == "COMPLETE"


def test_a_configuration_in_the_working_directory_is_not_read(
    tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stolen.jsonl"
    text = json.dumps({"transport": {"type": "file", "log_file_path": str(file), "append": True}})
    (tmp_path / "openlineage.yml").write_text(text)
    monkeypatch.chdir(tmp_path)
    track()
    with post_server() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", server.url)
        track()
        assert received(server)
    assert not file.exists()


def test_variables_turn_the_events_on_and_off(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_by_environment() == ([], [])
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    assert find_by_environment() == (["openlineage"], [])
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    assert find_by_environment() == ([], [])


def test_without_the_package_a_run_has_one_warning(
    tracked: Path, without_openlineage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    (warning,) = track().warnings
    assert warning.endswith("openlineage, whose package is not installed: pip install 'finetune-flows[openlineage]'.")


@pytest.mark.slow
@pytest.mark.parametrize("server", ["refuses", "fails", "is silent"])
def test_a_dead_server_is_one_warning_and_costs_the_run_seconds_at_its_end(
    tracked: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setattr("tasks.tracking.openlineage.OpenLineage.last_wait_s", 2.0)
    with post_server() as listening:
        listening.answer = 503
        if server == "is silent":
            listening.silent.set()
        url = f"http://127.0.0.1:{closed_port()}" if server == "refuses" else listening.url
        monkeypatch.setenv("OPENLINEAGE_URL", url)
        began = time.monotonic()
        tracking = track(*((stage, "ran") for stage in ("load_data", "fit", "score")), log=with_record())
        # Of a client that repeats its requests: 9 s for each of the 8 events.
        assert time.monotonic() - began < 20
    (warning,) = tracking.warnings
    assert warning.startswith("OpenLineage lacks a part of this run (") and tracking.trouble is None
    assert not Outbox(RUN).read_undelivered() and len([*Outbox(RUN).read_entries("text")]) == 0, "not trimmed"


def test_a_failed_run_names_the_places_of_its_problems_and_not_their_messages(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = json.dumps([{"where": "train.csv:7", "message": "'a private text' is no label"}] * 2)
    with post_server() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", server.url)
        track(status="FAILED", log=lambda tracking: tracking.log_text("problems.json", problems))
        *_, last = received(server)
    assert last["eventType"] == "FAIL"
    assert last["run"]["facets"]["errorMessage"]["message"] == "problems: 2, in train.csv:7"


@functools.cache
def facet_types() -> dict[str, Any]:
    """The generated classes by the address of their schema."""
    for module in pkgutil.iter_modules(generated.__path__):
        importlib.import_module(f"{generated.__name__}.{module.name}")
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{generated.__name__}.")]
    classes = [one for module in modules for one in vars(module).values() if isinstance(one, type) and attr.has(one)]
    return {one._get_schema(): one for one in classes if hasattr(one, "_get_schema")}


def validate(expected: Any, value: Any) -> None:
    """Holds JSON values against a type of the generated classes: fields, their types, and the classes' validators."""
    arguments = typing.get_args(expected)
    if typing.get_origin(expected) in (list, dict):
        for one in value.values() if isinstance(value, dict) else value:
            validate(arguments[-1], one)
    elif arguments:  # a union with None
        validate(arguments[0], value)
    elif attr.has(expected):
        expected = facet_types().get(value.get("_schemaURL"), expected)
        hints = typing.get_type_hints(expected)
        fields = {field.name: field for field in attr.fields(expected)}
        assert value.keys() <= fields.keys(), (expected, value)
        assert all(name in value for name, field in fields.items() if field.default is attr.NOTHING), (expected, value)
        for name, inside in value.items():
            validate(hints[name], inside)
        given = {fields[name].alias: inside for name, inside in value.items() if fields[name].init}
        expected(**given)
    elif isinstance(expected, type) and issubclass(expected, enum.Enum):
        expected(value)
    elif isinstance(expected, type):
        assert isinstance(value, (int, float) if expected is float else expected), (expected, value)
