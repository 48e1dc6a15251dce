"""Servers that die in the middle of a run: the run ends all the same, and they get its records when they are back."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.tracking.outbox import Outbox
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, command, environment, states
from tests.servers import Server, mlflow_server, prefect_server
from tests.waiting import wait_until
from training.jobs.processes import send
from training.jobs.protocol import read_events

# Less than one call that waits for Prefect's server to come back, or for two answers of MLflow's.
NO_TIME_LOST_S = 30
# Where one program after another takes long to start even if nothing dies, so many times as long is still no loss.
SLOW_MACHINE = 3


@pytest.fixture
def mlflow(tmp_path: Path, fresh_database: Path) -> Iterator[Server]:
    server = mlflow_server(tmp_path, fresh_database)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def prefect(tmp_path: Path) -> Iterator[Server]:
    server = prefect_server(tmp_path)
    server.start()
    yield server
    server.kill()


def run_of(client: MlflowClient, flow_run: str) -> Run | None:
    experiment = client.get_experiment_by_name("small")
    chosen = f"tags.`finetune.flow_run_id` = '{flow_run}'"
    found = client.search_runs([experiment.experiment_id], chosen) if experiment else []
    assert len(found) <= 1
    return found[0] if found else None


def curve_in(events: Path) -> dict[str, list[tuple[float, int, int]]]:
    """Each figure of the file's events, as MLflow should have it: value, time in milliseconds, step."""
    curve: dict[str, list[tuple[float, int, int]]] = {}
    for event in map(json.loads, events.read_text().splitlines()):
        if event["kind"] == "metrics":
            for name, value in event["values"].items():
                curve.setdefault(f"fit/{name}", []).append((value, int(event["time"] * 1000), event["step"]))
    return curve


def curve_of(client: MlflowClient, run: Run) -> dict[str, list[tuple[float, int, int]]]:
    """The same, of the names that MLflow has; `fit/` figures that came at the stage's end have no step."""
    names = [name for name in run.data.metrics if name.startswith("fit/")]
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    return {name: [(p.value, p.timestamp, p.step) for p in points] for name, points in histories.items()}


def times(events: Path) -> list[float]:
    return [json.loads(line)["time"] for line in events.read_text().splitlines()]


def training_and_answers(home: Path, result: dict[str, Any]) -> list[Path]:
    """The events of the stages fit and predict."""
    artifacts = {stage["name"]: stage["artifact"] for stage in result["stages"]}
    return [home / artifacts[name] / "log" / "events.jsonl" for name in ("fit", "predict")]


def longest_silence_s(moments: list[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(moments))


@pytest.mark.drill
def test_a_run_whose_mlflow_and_prefect_die_in_training_ends_and_the_next_one_delivers_all_records(
    finished: FinishedRun, mlflow: Server, prefect: Server, tmp_path: Path
) -> None:
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    argv = ["run", str(finished.file), "--set", "training.num_train_epochs=30", "--json"]
    servers = {"MLFLOW_TRACKING_URI": mlflow.url, "PREFECT_API_URL": f"{prefect.url}/api"}
    client = MlflowClient(mlflow.url)
    for server in (mlflow, prefect):
        server.wait()
    run = subprocess.Popen(
        command(*argv, str(tmp_path / "first.json")),
        env=environment(home, **servers),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: run.poll() is not None or _that_has_evaluated(home))
    program = _that_has_evaluated(home)
    assert program, "the training was too short to be hit"
    # It holds its breath till MLflow has its first figures: the training may be over before that otherwise.
    send(program, signal.SIGSTOP)
    try:
        wait_until(lambda: run.poll() is not None or _training_is_tracked(client))
        assert run.poll() is None
        killed_at = time.time()
        mlflow.kill()
        prefect.kill()
    finally:
        send(program, signal.SIGCONT)
    printed = run.communicate(timeout=200)[0]

    # It ends: all that needs no server is done, without delay, and the messages name the rest.
    first = json.loads((tmp_path / "first.json").read_text())
    assert run.returncode == 1, printed
    ended = {name: state for name, state in states(tmp_path / "first.json").items() if state != "cached"}
    assert ended == {"resolve": "ran", "fit": "ran", "predict": "ran", "score": "ran"} | {"find_champion": "failed"}
    fit, predict = training_and_answers(home, first)
    after = [killed_at, *(moment for moment in times(fit) + times(predict) if moment > killed_at)]
    assert times(fit)[-1] > killed_at
    undisturbed = training_and_answers(finished.home, finished.result)
    usual_s = longest_silence_s([moment for events in undisturbed for moment in times(events)])
    assert longest_silence_s(after) < max(NO_TIME_LOST_S, SLOW_MACHINE * usual_s)
    assert "Traceback" not in printed and "Error" not in printed.replace("ConnectionError", "")
    assert f"find_champion: MLflow at {mlflow.url} fails: start it" in printed and "Connection refused" in printed
    assert "the same command continues from there" in printed
    assert "MLflow lacks a part of this run" in printed and "The Prefect server does not answer" in printed
    assert len(first["warnings"]) == 2

    # The same command, with the servers back, completes the run and delivers the missing records.
    mlflow.start()
    prefect.start()
    mlflow.wait()
    prefect.wait()
    again = finetune(home, *argv, str(tmp_path / "second.json"), **servers)
    assert again.returncode == 0, again.stderr
    second = json.loads((tmp_path / "second.json").read_text())
    assert states(tmp_path / "second.json")["fit"] == "cached" and second["warnings"] == []
    assert second["model"]["registered"] == "small/1"
    for result, status in ((first, "FAILED"), (second, "FINISHED")):
        tracked = run_of(client, result["flow_run_id"])
        assert tracked is not None and tracked.info.status == status
        known, curve = curve_of(client, tracked), curve_in(fit)
        assert len(curve["fit/eval_loss"]) == 30 and {name: known[name] for name in curve} == curve
        shown = {file.path for file in client.list_artifacts(tracked.info.run_id, "fit")}
        assert {"fit/events.jsonl", "fit/loss.png"} <= shown
    with (
        temporary_settings({PREFECT_API_URL: servers["PREFECT_API_URL"]}),
        get_client(sync_client=True) as api,
    ):
        known_states = {str(run.id): run.state_name for run in api.read_flow_runs()}
    assert known_states == {first["flow_run_id"]: "Failed", second["flow_run_id"]: "Completed"}


def _that_has_evaluated(home: Path) -> int | None:
    """The pid of the program that trains, once it has evaluated for the first time."""
    for path in home.glob("jobs/*/events.jsonl"):
        events = read_events(path, 0)[0]
        if any("eval_loss" in event.get("values", {}) for event in events):
            return int(events[0]["pid"])
    return None


def _training_is_tracked(client: MlflowClient) -> bool:
    experiment = client.get_experiment_by_name("small")
    runs = client.search_runs([experiment.experiment_id]) if experiment else []
    return any("fit/eval_loss" in run.data.metrics for run in runs)


def test_a_command_that_finds_nothing_changed_delivers_what_earlier_runs_left(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    Outbox("left").put("start", experiment="small")
    run = finetune(home, "run", str(finished.file))
    assert run.returncode == 0 and "Nothing changed" in run.stdout, run.stderr
    tracked = run_of(MlflowClient(f"sqlite:///{home / 'mlflow.db'}"), "left")
    assert tracked is not None and tracked.info.status == "KILLED"
