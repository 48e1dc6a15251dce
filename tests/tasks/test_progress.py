"""What Prefect shows of a long stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prefect.context
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.runtime import flow_run, task_run
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tasks.runtime import progress
from tasks.runtime.progress import PrefectProgress
from tasks.runtime.stage import Row

UP_TO = [{"kind": "progress", "done": done, "total": 4} for done in range(1, 4)]


@pytest.fixture(autouse=True)
def quick(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "UPDATE_S", 0.0)
    monkeypatch.setattr(progress, "END_WAIT_S", 60.0)  # what is shown is tested here, not how fast the server is
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def run(state: str, events: list[dict[str, Any]]) -> tuple[list[Any], str]:
    """The progress artifacts of a flow with one task, and the task run's id."""
    ids: list[str] = []

    @task
    def fit() -> None:
        ids.append(str(task_run.get_id()))
        for event in events:
            shown.stage_events("fit", [event])

    @flow(name="fit")
    def body() -> None:
        ids.append(str(flow_run.get_id()))
        shown.stage_started("fit", "k")
        fit()
        shown.stage_ended(Row("fit", "k", state, 1.0), None)
        shown.end()

    shown = PrefectProgress()
    body()
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[ids[0]]))
        return client.read_artifacts(artifact_filter=chosen), ids[1]


def test_a_stage_has_one_bar_that_is_full_when_it_ended_well() -> None:
    (bar,), task_id = run("ran", UP_TO)
    assert (bar.key, bar.data, bar.type, str(bar.task_run_id)) == ("finetune-fit", 100.0, "progress", task_id)


def test_a_bar_moves_on_the_server_of_its_run_even_where_other_threads_know_of_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        monkeypatch.setattr(prefect.context, "GLOBAL_SETTINGS_CONTEXT", prefect.context.get_settings_context())
    (bar,), _ = run("ran", UP_TO)
    assert bar.data == 100.0


def test_the_bar_of_a_stage_that_failed_stays_where_it_was() -> None:
    (bar,), _ = run("failed", UP_TO)
    assert bar.data == 75.0


def test_a_stage_without_progress_has_no_bar() -> None:
    assert run("cached", [{"kind": "note", "message": "found"}])[0] == []


def test_figures_and_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"kind": "metrics", "step": 5, "values": {"loss": 0.123456}}
    run("ran", [metrics, {"kind": "warning", "message": "rows are cut"}])
    said = [(record.levelname, record.message) for record in caplog.records if record.message.startswith("fit: ")]
    assert said == [("INFO", "fit: step 5: loss 0.1235"), ("WARNING", "fit: rows are cut")]


@pytest.mark.filterwarnings("ignore:Artifact creation outside")
def test_a_server_that_is_down_delays_no_stage(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "END_WAIT_S", 5.0)
    shown = PrefectProgress()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        started = time.monotonic()
        shown.stage_events("fit", UP_TO)
        shown.stage_ended(Row("fit", "k", "ran", 1.0), None)
        assert time.monotonic() - started < 0.5
        shown.end()
        assert time.monotonic() - started < 8
