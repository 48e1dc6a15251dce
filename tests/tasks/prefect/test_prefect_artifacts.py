"""Progress of a long stage in Prefect."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prefect.context
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import State, StateType
from prefect.runtime import flow_run, task_run
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tasks.cache.results import Artifact, Publication, Version
from tasks.cache.stage import Row
from tasks.prefect import prefect_artifacts
from tasks.prefect.prefect_artifacts import PrefectProgress
from tasks.tracking.connection import run_url
from training.data.load_rows import LoadDataResult
from training.problems import Problem
from training.tokenization.token_files import TokenizeResult

UP_TO = [{"kind": "progress", "done": done, "total": 4} for done in range(1, 4)]


@pytest.fixture(autouse=True)
def quick(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prefect_artifacts, "UPDATE_S", 0.0)
    monkeypatch.setattr(
        prefect_artifacts, "END_WAIT_S", 60.0
    )  # what is shown is tested here, not how fast the server is
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
    assert bar.description == "fit: ran, 1 s"


def test_a_bar_moves_on_the_server_of_its_run_even_where_other_threads_know_of_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        monkeypatch.setattr(prefect.context, "GLOBAL_SETTINGS_CONTEXT", prefect.context.get_settings_context())
    (bar,), _ = run("ran", UP_TO)
    assert bar.data == 100.0


def test_the_bar_of_a_stage_that_failed_stays_where_it_was() -> None:
    more = {"loss": 0.5, "rows_per_second": 1391.25}
    (bar,), _ = run("failed", [event | more for event in UP_TO])
    assert bar.data == 75.0
    assert re.fullmatch(
        r"fit: step 3 of 4, train loss 0\.500, 1,391 rows/s, ends about \d\d:\d\d UTC", str(bar.description)
    )


def test_a_stage_without_progress_has_no_bar() -> None:
    assert run("cached", [{"kind": "note", "message": "found"}])[0] == []


def test_a_run_that_waits_is_shown_as_waiting_with_the_reason_until_it_goes_on() -> None:
    def states(wanted: int) -> list[tuple[str, str | None]]:
        deadline = time.monotonic() + 30
        while True:
            with get_client(sync_client=True) as client:
                found = client.read_flow_run_states(uuid.UUID(ids[0]))
            if len(found) >= wanted or time.monotonic() > deadline:
                return [(state.name, state.message) for state in sorted(found, key=lambda state: state.timestamp)][2:]

    ids: list[str] = []
    shown = PrefectProgress()

    @flow(name="waits")
    def body() -> list[tuple[str, str | None]]:
        ids.append(str(flow_run.get_id()))
        shown.stage_started("fit", "k")
        shown.stage_events("fit", [{"kind": "waiting", "message": "2 machines with 1 cores each"}])
        states(wanted=3)
        shown.stage_events("fit", [{"kind": "progress", "done": 1, "total": 4}])
        before_end = states(wanted=4)
        shown.end()
        return before_end

    assert body() == [("Waiting", "fit: 2 machines with 1 cores each"), ("Running", "")]


def test_a_run_that_is_being_cancelled_is_not_shown_as_waiting() -> None:
    @flow(name="cancelling")
    def body() -> str | None:
        run = uuid.UUID(flow_run.get_id())
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run, State(type=StateType.CANCELLING), force=True)
            prefect_artifacts.Running(run, "Waiting").update(run)
            return client.read_flow_run(run).state_name

    assert body() == "Cancelling"


ROWS = {
    "rows": {"train": 90, "validation": 10},
    "labels": {"train": {"a|b": 60, "c": 30}, "validation": {"a|b": 5, "c": 5}},
    "characters": {"train": {"min": 1, "median": 2, "max": 3000}, "validation": {}},
    "held_out": {"validation": 0.1},
    "problems": [{"level": "warning", "check": "duplicates", "where": "train.csv row 7", "message": "stands twice."}],
}
TOKENS = {
    "truncated": {"train": 4, "validation": 0},
    "length": {"train": {"min": 3, "median": 9, "max": 16}, "validation": {}},
    "problems": [{"level": "warning", "check": "truncated", "where": "tokens.max_length", "message": "16 cuts 4."}],
}


def table_of(home: Path, then: Callable[[PrefectProgress], None] = lambda shown: None) -> Any:
    """The one table of a run in which rows were loaded and tokenized and `then` something happened."""

    @flow(name="reports")
    def body() -> str:
        shown = PrefectProgress()
        rows, tokens = LoadDataResult(labels=2, warnings=0), TokenizeResult(rows=9, tokens=9, truncated=4, lost=1)
        for stage, report, result in (("load_data", ROWS, rows), ("tokenize", TOKENS, tokens)):
            ref = Artifact(stage=stage, key="k", digest="d", result=result)
            (ref.path / "log").mkdir(parents=True)
            (ref.path / "log" / "report.json").write_text(json.dumps(report))
            shown.stage_ended(Row(stage, "k", "cached", 1.0), ref)
            time.sleep(0.5)  # else the second table is sent in place of the first
        then(shown)
        shown.end()
        return str(flow_run.get_id())

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[body()]))
    with get_client(sync_client=True) as client:
        (table,) = client.read_artifacts(artifact_filter=chosen)
    return table


def test_the_report_on_rows_and_tokens_is_one_table_of_the_flow_run(home: Path) -> None:
    table = table_of(home)
    assert (table.key, table.type, table.task_run_id) == ("finetune-data-report", "table", None)
    assert json.loads(table.data) == [*ROWS["problems"], *TOKENS["problems"]]
    assert table.description.splitlines()[2:] == [
        "| split | rows | held out of train | characters (min, median, max) | tokens (median, max) | rows cut |",
        "| --- | --- | --- | --- | --- | --- |",
        "| train | 90 |  | 1, 2, 3,000 | 9, 16 | 4 |",
        "| validation | 10 | 10% |  |  | 0 |",
        "",
        "| label | train | validation |",
        "| --- | --- | --- |",
        "| a\\|b | 60 (66.7%) | 5 (50.0%) |",
        "| c | 30 (33.3%) | 5 (50.0%) |",
    ]


def test_figures_worst_errors_and_the_groups_of_slices_are_tables_of_their_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [{"split": "test", "text": "good", "label": "pos", "prediction": "neg", "probability": "0.9"}]
    groups = [{"split": "test", "slice": "genre", "group": "war", "rows": "12", "accuracy": "0.5000"}]
    monkeypatch.setattr(prefect_artifacts, "find_worst_errors", lambda scores: wrong)
    monkeypatch.setattr(prefect_artifacts, "tabulate_slices", lambda scores: groups)

    @flow(name="scored")
    def body() -> str:
        shown = PrefectProgress()
        figures = {"test": {"f1": {"value": 0.5, "low": 0.25, "high": 0.75}, "loss": {"value": None}}}
        shown.stage_ended(Row("score", "k", "ran", 1.0), Artifact(stage="score", key="k", digest="d", result=figures))
        folds = Artifact(stage="score_folds", key="k", digest="d", result={"train": {"f1": {"value": 0.625}}})
        shown.stage_ended(Row("score_folds", "k", "ran", 1.0), folds)
        shown.end()
        return str(flow_run.get_id())

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[body()]))
    with get_client(sync_client=True) as client:
        tables = client.read_artifacts(artifact_filter=chosen)
    by_key = {str(table.key): json.loads(table.data) for table in tables}
    table = [
        {"split": "test", "metric": "f1", "value": "0.5000", "95 % interval": "0.2500 to 0.7500"},
        {"split": "test", "metric": "loss", "value": "-", "95 % interval": "-"},
    ]
    folds = [{"split": "out of fold", "metric": "f1", "value": "0.6250", "95 % interval": "-"}]
    assert by_key == {
        "finetune-figures": table,
        "finetune-worst-errors": wrong,
        "finetune-slices": groups,
        "finetune-out-of-fold": folds,
    }


def test_a_run_links_what_it_made_where_that_has_an_address(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        Version(name="small", version="3"),
        Publication(repo="me/small", revision="main", commit="c", url="https://hub/me/small"),
    ]

    @flow(name="links")
    def body() -> str:
        shown = PrefectProgress(lambda: {"MLflow": url} if (url := run_url("a1b2")) else {})
        for result in made:
            shown.stage_started("any", "k")
            shown.stage_ended(Row("any", "k", "ran", 1.0), result)
        shown.end()
        return str(flow_run.get_id())

    links = {}
    for uri in ("http://me:secret@127.0.0.1:5000/", "sqlite:///mlflow.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[body()]))
        with get_client(sync_client=True) as client:
            links[uri] = {str(one.key): one.data for one in client.read_artifacts(artifact_filter=chosen)}
    assert list(links.values()) == [
        {
            "finetune-mlflow-run": "[The MLflow run](http://127.0.0.1:5000/#/runs/a1b2)",
            "finetune-registered-version": "[small version 3](http://127.0.0.1:5000/#/models/small/versions/3)",
            "finetune-hub": "[me/small](https://hub/me/small)",
        },
        {"finetune-hub": "[me/small](https://hub/me/small)"},
    ]


def test_why_rows_were_refused_stands_at_the_tables_top(home: Path) -> None:
    problems = [Problem(kind="tokens", where="tokens.max_length", message="16 cuts 4.", check="truncated")]
    rows = json.loads(table_of(home, lambda shown: shown.refused(problems)).data)
    assert [row["level"] for row in rows] == ["error", "warning", "warning"]


def test_evaluations_warnings_and_a_line_a_stage_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    steps = [{"train_loss": 0.5}, {"eval_loss": 0.123456, "eval_runtime": 2.0, "epoch": 1.0}]
    metrics = [{"kind": "metrics", "step": 5, "values": values} for values in steps]
    run("ran", [*metrics, {"kind": "warning", "message": "rows are cut"}])
    logged = [(record.levelname, record.message) for record in caplog.records if record.message.startswith("fit: ")]
    evaluated = ("INFO", "fit: step 5: validation loss 0.1235, epoch 1")
    assert logged == [evaluated, ("WARNING", "fit: rows are cut"), ("INFO", "fit: ran, 1 s")]


@pytest.mark.filterwarnings("ignore:Artifact creation outside")
def test_a_server_that_never_answers_delays_no_stage(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_artifacts, "END_WAIT_S", 0.5)
    monkeypatch.setattr(prefect_artifacts, "get_run_logger", lambda: logging.getLogger("no-run"))
    shown = PrefectProgress()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}):
            started = time.monotonic()
            shown.stage_events("fit", UP_TO)
            shown.stage_ended(Row("fit", "k", "ran", 1.0), None)
            shown.end()
            assert time.monotonic() - started < 30  # a request would wait for a minute
