"""MLflow: one run a flow run, nothing lost, nothing twice."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run

from tasks.cache import store
from tasks.cache.results import Artifact
from tasks.cache.stage import Row
from tasks.tracking import mlflow_run, run_tracker
from tasks.tracking.connection import FLOW_RUN_TAG, MlflowFailed, build_environment, connect, mlflow_errors
from tasks.tracking.mlflow_run import Mlflow, deliver_earlier_runs, run_of
from tasks.tracking.outbox import OUTBOX, Outbox, find_undelivered, is_running_here, was_killed_here
from tasks.tracking.run_tracker import RunTracker
from tasks.tracking.tracker import Delivery
from tests.fork_server import COMMANDS, Fork, run_code
from tests.servers import Server, closed_port, mlflow_server
from tests.waiting import wait_until


def runs() -> list[Run]:
    client = connect()
    return list(client.search_runs([found.experiment_id for found in client.search_experiments()]))


def the_run() -> Run:
    (run,) = runs()
    return run


def history(name: str) -> list[tuple[float, int, int]]:
    points = connect().get_metric_history(the_run().info.run_id, name)
    return [(point.value, point.timestamp, point.step) for point in points]


def files(run: Run, under: str = "") -> list[str]:
    found = []
    for entry in connect().list_artifacts(run.info.run_id, under or None):
        found += files(run, entry.path) if entry.is_dir else [entry.path]
    return sorted(found)


EVENTS = [
    {"time": 1000.5, "kind": "metrics", "step": 10, "values": {"loss": 0.5, "learning_rate": 1e-5}},
    {"time": 1001.0, "kind": "progress", "done": 1, "total": 2},
    {"time": 1002.5, "kind": "metrics", "step": 20, "values": {"loss": 0.25}},
]


def artifact(stage: str = "load_data", **figures: float) -> Artifact:
    with store.filling(stage, "k" * 40) as aside:
        (aside / "report.json").write_text("{}")
        (aside / "train.arrow").write_bytes(b"rows")
        (aside / "log").mkdir()
        (aside / "log" / "1.log").write_text("printed")
        (aside / "log" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
        return store.publish(aside, stage, "k" * 40, {}, {"train_rows": 3, "labels": 2, "inner": {"x": 1.5}, **figures})


def test_a_run_has_its_parameters_tags_figures_files_and_data(tracked: Path) -> None:
    tracker = RunTracker("recipe", "flow-1")
    tracker.log_params({"training.learning_rate": "3e-05", "name": "recipe"})
    tracker.log_text("recipe.yaml", "name: recipe\n")
    tracker.stage_started("load_data", "k" * 40)
    ref = artifact()
    tracker.stage_ended(Row("load_data", "k" * 40, "ran", 1.25), ref)
    tracker.end("FINISHED")
    assert tracker.trouble is None
    run = the_run()
    assert run.info.run_id == tracker.mlflow_run_id and run.info.status == "FINISHED"
    assert run.data.params == {"training.learning_rate": "3e-05", "name": "recipe"}
    assert run.data.tags[FLOW_RUN_TAG] == "flow-1"
    assert run.data.tags["load_data.key"] == "k" * 40
    assert (run.data.tags["load_data.state"], run.data.tags["load_data.digest"]) == ("ran", ref.digest)
    assert run.data.metrics == {
        "load_data/seconds": 1.25,
        "load_data/train_rows": 3.0,
        "load_data/labels": 2.0,
        "load_data/inner/x": 1.5,
    }
    shown = ["1.log", "events.jsonl", "inputs.json", "report.json"]
    assert files(run) == [*(f"load_data/{name}" for name in shown), "recipe.yaml"]
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, json.loads(data.dataset.source)) == ("train", {"uri": f"{ref.location}/train.arrow"})


def test_a_childs_figures_keep_their_own_times_and_steps_and_a_replay_adds_nothing(tracked: Path) -> None:
    for status in ("FAILED", "FINISHED"):
        tracker = RunTracker("recipe", "flow-1")
        tracker.stage_events("fit", EVENTS[:1])
        tracker.stage_events("fit", [*EVENTS, EVENTS[0] | {"kind": "speed", "values": {"tokens_per_second": 9.0}}])
        tracker.end(status)
    assert history("fit/speed/tokens_per_second") == [(9.0, 1_000_500, 10)]
    assert history("fit/loss") == [(0.5, 1_000_500, 10), (0.25, 1_002_500, 20)]
    assert history("fit/learning_rate") == [(1e-5, 1_000_500, 10)]


def test_an_outbox_delivered_twice_from_the_start_adds_nothing(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "trim", lambda outbox: None)
    tracker = RunTracker("recipe", "flow-1")
    tracker.log_params({"name": "recipe"})
    tracker.stage_events("fit", EVENTS)
    tracker.stage_ended(Row("load_data", "k" * 40, "ran", 1.25), artifact())
    tracker.end("FINISHED")
    before = the_run().to_dictionary()
    outbox = Outbox("flow-1")
    outbox.mark_delivered(0)
    Delivery(outbox, Mlflow(run_of(outbox))).deliver()
    assert the_run().to_dictionary() == before
    assert len(history("fit/loss")) == 2 and len(history("load_data/seconds")) == 1


def test_a_cached_training_brings_its_curve_into_the_new_run(tracked: Path) -> None:
    ref = artifact("fit", loss=0.375, steps=20)
    tracker = RunTracker("recipe", "flow-2")
    tracker.stage_ended(Row("fit", "k" * 40, "cached", 0.1), ref)
    tracker.end("FINISHED")
    # A figure of the same name, the mean here, is no point of the curve.
    assert history("fit/loss") == [(0.5, 1_000_500, 10), (0.25, 1_002_500, 20)]
    assert [value for value, _, _ in history("fit/steps")] == [20]


def test_a_retried_flow_run_goes_on_in_its_mlflow_run(tracked: Path) -> None:
    first = RunTracker("recipe", "flow-1")
    first.log_params({"name": "recipe"})
    first.end("FAILED")
    assert the_run().info.status == "FAILED"
    second = RunTracker("recipe", "flow-1")
    second.log_params({"name": "recipe"})
    wait_until(lambda: the_run().info.status == "RUNNING")
    second.end("FINISHED")
    assert second.mlflow_run_id == first.mlflow_run_id == the_run().info.run_id
    assert the_run().info.status == "FINISHED"


def test_a_resumed_run_has_each_figure_of_a_stage_once_and_new_figures_of_a_new_result(tracked: Path) -> None:
    ref = artifact()
    for state, seconds in (("ran", 1.25), ("cached", 0.5), ("cached", 0.25)):
        tracker = RunTracker("recipe", "flow-1")
        tracker.stage_ended(Row("load_data", "k" * 40, state, seconds), ref)
        tracker.log_points({"trials/accuracy": 0.75}, 1)
        tracker.end("KILLED")
    assert [(value, step) for value, _, step in history("trials/accuracy")] == [(0.75, 1)]
    assert [value for value, _, _ in history("load_data/seconds")] == [1.25]
    assert [value for value, _, _ in history("load_data/train_rows")] == [3.0]
    other = RunTracker("recipe", "flow-1")
    other.stage_ended(
        Row("load_data", "k" * 40, "ran", 2.0),
        ref.model_copy(update={"digest": "f" * 64, "result": {"train_rows": 4}}),
    )
    other.end("FINISHED")
    assert the_run().data.metrics["load_data/train_rows"] == 4.0


def test_a_record_that_mlflow_refuses_holds_up_no_other(tracked: Path) -> None:
    first = RunTracker("recipe", "flow-1")
    first.log_params({"name": "recipe", "kind": "a"})
    first.end("FAILED")
    second = RunTracker("recipe", "flow-1")
    # A parameter that changed, and a name that MLflow does not take, among good ones.
    second.log_params({"name": "recipe", "kind": "b", "odd*name": "x", "more": "y"})
    second.set_tags({"fit.key": "k"})
    second.end("FINISHED")
    run = the_run()
    assert second.trouble is None and run.info.status == "FINISHED"
    assert run.data.params == {"name": "recipe", "kind": "a", "more": "y"} and run.data.tags["fit.key"] == "k"


def test_long_values_are_cut_to_what_mlflow_takes(tracked: Path) -> None:
    tracker = RunTracker("recipe", "flow-1")
    tracker.log_params({"long": "x" * 10_000})
    tracker.set_tags({"long": "x" * 10_000})
    tracker.end("FINISHED")
    run = the_run()
    assert (len(run.data.params["long"]), len(run.data.tags["long"])) == (6000, 8000)


def test_a_run_whose_process_died_is_closed_as_killed_while_the_next_one_runs(tracked: Path) -> None:
    dead = Outbox("dead")
    dead.put("start", experiment="recipe")
    dead.put("tags", values={"fit.key": "k"})
    alive = RunTracker("other-recipe", "alive")
    wait_until(lambda: len(runs()) == 2 and all(r.info.status != "RUNNING" for r in runs() if of(r) == "dead"))
    assert {of(run): run.info.status for run in runs()} == {"dead": "KILLED", "alive": "RUNNING"}
    alive.end("FINISHED")
    assert {of(run): run.info.status for run in runs()} == {"dead": "KILLED", "alive": "FINISHED"}
    assert [run.data.tags.get("fit.key") for run in runs() if of(run) == "dead"] == ["k"]


def test_figures_that_mlflow_has_are_dropped_from_the_outbox_of_a_run_that_ended_or_died(tracked: Path) -> None:
    dead = Outbox("dead")
    dead.put("start", experiment="recipe")
    dead.put("metrics", points=[["fit/loss", 0.5, 0, 1]])
    alive = RunTracker("recipe", "alive")
    alive.stage_events("fit", EVENTS)
    wait_until(lambda: len(runs()) == 2 and all(r.info.status != "RUNNING" for r in runs() if of(r) == "dead"))
    alive.end("FINISHED")
    assert all("fit/loss" in run.data.metrics for run in runs())
    for name in ("dead", "alive"):
        assert b"metrics" not in (Outbox(name).folder / OUTBOX).read_bytes(), name


def of(run: Run) -> str:
    return str(run.data.tags[FLOW_RUN_TAG])


def test_a_run_that_mlflow_hears_of_after_its_end_did_not_begin_after_it(tracked: Path) -> None:
    outbox = Outbox("flow-1")
    outbox.put("start", experiment="recipe")
    outbox.put("end", status="FINISHED")
    time.sleep(0.05)
    assert deliver_earlier_runs() is None
    info = the_run().info
    assert info.start_time == int(outbox.read_start()["time"] * 1000) <= info.end_time


def test_a_run_that_another_process_works_on_is_left_alone(tracked: Path) -> None:
    other = Outbox("other")
    other.put("start", experiment="recipe")
    with other.claim_run():
        tracker = RunTracker("recipe", "mine")
        tracker.end("FINISHED")
    assert {of(run): run.info.status for run in runs()} == {"mine": "FINISHED"}


@pytest.mark.slow
def test_a_run_that_cannot_be_delivered_does_not_hold_up_the_others(tracked: Path) -> None:
    for name, experiment in (("a-dead", ""), ("b-dead", "recipe")):  # MLflow takes no empty name
        Outbox(name).put("start", experiment=experiment)
    tracker = RunTracker("recipe", "mine")
    wait_until(lambda: tracker.trouble is not None)
    tracker.end("FINISHED")
    assert {of(run): run.info.status for run in runs()} == {"b-dead": "KILLED", "mine": "FINISHED"}
    assert tracker.trouble is not None and "experiment name" in tracker.trouble


def test_an_experiment_that_was_deleted_in_mlflow_is_restored_with_a_warning(tracked: Path) -> None:
    RunTracker("recipe", "before").end("FINISHED")
    Outbox("dead").put("start", experiment="other-recipe")
    client = connect()
    for name in ("recipe", "other-recipe"):
        found = client.get_experiment_by_name(name)
        client.delete_experiment(found.experiment_id if found else client.create_experiment(name))
    tracker = RunTracker("recipe", "after")
    wait_until(lambda: len(runs()) == 3)
    tracker.end("FINISHED")
    statuses = {"before": "FINISHED", "dead": "KILLED", "after": "FINISHED"}
    assert tracker.trouble is None and {of(run): run.info.status for run in runs()} == statuses
    assert [warning.partition(" was deleted")[0] for warning in tracker.warnings] == [
        "The experiment 'recipe'",
        "The experiment 'other-recipe'",
    ]


@pytest.mark.slow
def test_a_tracker_that_is_down_holds_up_no_run_and_its_password_is_not_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{closed_port()}")
    started = time.monotonic()
    tracker = RunTracker("recipe", "flow-1")
    tracker.stage_events("fit", EVENTS)
    tracker.stage_ended(Row("load_data", "k" * 40, "ran", 1.25), artifact())
    assert time.monotonic() - started < 2
    tracker.end("FINISHED")
    assert time.monotonic() - started < 15
    assert tracker.mlflow_run_id is None
    assert tracker.trouble is not None and "secret" not in tracker.trouble and "127.0.0.1" in tracker.trouble
    assert len(Outbox("flow-1").read_undelivered()) > 5


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers_holds_up_no_run_for_longer_than_its_limit(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tracker, "LAST_WAIT_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracker = RunTracker("recipe", "flow-1")
        tracker.stage_events("fit", EVENTS)
        started = time.monotonic()
        tracker.end("FINISHED")
        assert time.monotonic() - started < 10
        assert tracker.trouble == "it did not answer within 2 s"
    assert len(Outbox("flow-1").read_undelivered()) == 3


class Failing(BaseHTTPRequestHandler):
    """Answers everything with an error of its own."""

    def do_GET(self) -> None:
        self.send_error(500)

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.mark.slow
def test_a_server_that_fails_in_everything_holds_up_no_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Failing) as failing:
        threading.Thread(target=failing.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{failing.server_port}")
        tracker = RunTracker("recipe", "flow-1")
        tracker.stage_events("fit", EVENTS)
        wait_until(lambda: tracker.trouble is not None)
        started = time.monotonic()
        tracker.end("FINISHED")
        assert time.monotonic() - started < 15
        failing.shutdown()
    assert tracker.trouble is not None and "500" in tracker.trouble
    assert len(Outbox("flow-1").read_undelivered()) == 3


@pytest.mark.slow
def test_the_load_of_the_machine_is_tracked_also_of_the_time_when_no_server_answers(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_run, "SAMPLE_S", 0.2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
    dead = RunTracker("recipe", "flow-1")
    wait_until(lambda: len([e for e, _ in Outbox("flow-1").read_undelivered() if e["entry"] == "metrics"]) > 2)
    dead.end("FINISHED")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert deliver_earlier_runs() is None
    assert the_run().info.status == "FINISHED"
    assert len(history("system/cpu_utilization_percentage")) > 2
    assert deliver_earlier_runs() is None and not find_undelivered()


def test_a_sample_that_comes_after_the_end_leaves_the_run_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, begun, reported = threading.Event(), threading.Event(), threading.Event()

    def slow(tell: Callable[[dict[str, float]], None], ended: threading.Event) -> None:
        begun.set()
        taken.wait()
        tell({"cpu_utilization_percentage": 50.0})
        reported.set()

    monkeypatch.setattr(run_tracker, "sample_system_metrics", slow)
    for name in ("LOAD_WAIT_S", "LAST_WAIT_S", "DEAD_WAIT_S"):
        monkeypatch.setattr(run_tracker, name, 0.1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
    tracker = RunTracker("recipe", "flow-1")
    assert begun.wait(60)
    tracker.end("FINISHED")
    taken.set()
    assert reported.wait(60)
    assert not Outbox("flow-1").is_open()


def test_records_lost_to_a_full_disk_are_reported_and_stop_no_sample(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_, full = os.open, threading.Event()

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if full.is_set() and str(path).endswith(OUTBOX):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(run_tracker, "sample_system_metrics", lambda tell, ended: None)
    monkeypatch.setattr(run_tracker, "DEAD_WAIT_S", 0.1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
    full.set()
    tracker = RunTracker("recipe", "flow-1")
    tracker._log_sample({"cpu_utilization_percentage": 50.0})  # the start is not on the disk: no error
    full.clear()
    tracker.set_tags({"fit.key": "k"})
    assert [entry["entry"] for entry, _ in Outbox("flow-1").read_undelivered()] == ["start", "metrics", "tags"]
    full.set()
    tracker.end("FINISHED")
    assert "lacks the end of this run for good" in tracker.warnings[-1] and Outbox("flow-1").is_open()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_takes_no_other_along_and_is_there_once(tracked: Path, value: float) -> None:
    event = {"time": 1000.5, "kind": "metrics", "step": 10, "values": {"loss": value, "eval_loss": 0.5}}
    tracker = RunTracker("recipe", "flow-1")
    tracker.stage_events("fit", [event])
    tracker.stage_events("fit", [event])
    tracker.end("FINISHED")
    assert tracker.trouble is None
    assert history("fit/eval_loss") == [(0.5, 1_000_500, 10)]
    ((found, *at),) = history("fit/loss")
    assert at == [1_000_500, 10]
    # A database holds no infinity: MLflow keeps the largest number instead.
    assert math.isnan(found) if math.isnan(value) else found == math.copysign(sys.float_info.max, value)


@pytest.fixture
def server(tmp_path: Path, fresh_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = mlflow_server(tmp_path, fresh_database)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    yield server
    server.kill()


@pytest.mark.slow
def test_records_that_a_server_misses_before_and_during_a_run_are_delivered_once_when_it_is_back(
    home: Path, server: Server
) -> None:
    first = RunTracker("recipe", "flow-1")
    first.stage_events("fit", EVENTS)
    first.stage_ended(Row("load_data", "k" * 40, "ran", 1.25), artifact())
    first.end("FINISHED")
    assert first.mlflow_run_id is None
    server.start()
    second = RunTracker("recipe", "flow-2")  # begins while the server still starts
    second.stage_events("fit", EVENTS[:1])
    wait_until(lambda: second.mlflow_run_id is not None and second.trouble is None, timeout_s=60)
    server.kill()
    second.stage_events("fit", EVENTS[1:])
    wait_until(lambda: second.trouble is not None)
    server.start()
    wait_until(lambda: second.trouble is None, timeout_s=60)
    second.end("FINISHED")
    assert second.trouble is None
    by_flow = {of(run): run for run in runs()}
    assert {name: run.info.status for name, run in by_flow.items()} == {"flow-1": "FINISHED", "flow-2": "FINISHED"}
    late = by_flow["flow-1"]
    assert late.data.metrics["load_data/seconds"] == 1.25 and "load_data/report.json" in files(late)
    assert late.info.end_time is not None and late.info.end_time < by_flow["flow-2"].info.end_time
    for run in by_flow.values():
        points = connect().get_metric_history(run.info.run_id, "fit/loss")
        assert [(p.value, p.timestamp, p.step) for p in points] == [(0.5, 1_000_500, 10), (0.25, 1_002_500, 20)]


def test_a_failure_of_mlflow_is_reported_with_its_address_and_without_its_password(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{closed_port()}")
    with pytest.raises(MlflowFailed, match=r"^MLflow at http://127\..* fails: start it") as failed, mlflow_errors():
        connect()
    assert "secret" not in "".join(traceback.format_exception(failed.value))


TRACK = """
import sys
from tasks.tracking.run_tracker import RunTracker
tracker = RunTracker("recipe", sys.argv[1])
tracker.set_tags({"fit.key": sys.argv[1]})
tracker.end("FINISHED")
sys.exit(tracker.trouble)
"""


def test_two_processes_that_meet_at_a_fresh_database_both_track(home: Path, tmp_path: Path) -> None:
    environment, errors = {**os.environ, "MLFLOW_LOGGING_LEVEL": "WARNING"}, tmp_path / "errors"
    with open(errors, "ab") as printed:
        files = (0, 1, printed)
        both = [Fork(run_code, [TRACK, name], env=environment, files=files, level=COMMANDS) for name in ("one", "two")]
        for process in both:
            process.start()
    assert [process.join(90) for process in both] == [0, 0] and errors.read_text() == ""
    assert sorted(of(run) for run in runs()) == ["one", "two"]
    assert {run.info.status for run in runs()} == {"FINISHED"}


def test_a_child_finds_the_server_by_its_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_environment()["MLFLOW_TRACKING_URI"] == f"sqlite:///{home / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host")
    assert build_environment()["MLFLOW_REGISTRY_URI"] == "http://me:secret@host"


def test_a_run_that_starts_again_during_a_slow_delivery_of_its_records_is_not_taken_for_killed(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Outbox("flow-1")
    left.put("start", experiment="recipe")
    left.put("tags", values={"fit.key": "left"})
    reached, go_on, deliver = threading.Event(), threading.Event(), Mlflow.deliver

    def slowly(mlflow: Mlflow, entry: dict[str, Any]) -> None:
        if entry.get("values") == {"fit.key": "left"}:
            reached.set()
            assert go_on.wait(30)
        deliver(mlflow, entry)

    monkeypatch.setattr(Mlflow, "deliver", slowly)
    other = threading.Thread(target=deliver_earlier_runs)
    other.start()
    assert reached.wait(30)
    began = time.monotonic()
    tracker = RunTracker("recipe", "flow-1")  # the run is started again
    assert time.monotonic() - began < 10  # of the 30 s for which the other one waits
    assert is_running_here("flow-1") and not was_killed_here("flow-1")
    assert Outbox("flow-1").end_if_killed() is False
    go_on.set()
    other.join()
    assert is_running_here("flow-1") and deliver_earlier_runs() is None and Outbox("flow-1").is_open()
    assert the_run().info.status == "RUNNING"
    tracker.set_tags({"fit.key": "new"})
    tracker.end("FINISHED")
    assert tracker.trouble is None and not is_running_here("flow-1")
    assert the_run().info.status == "FINISHED" and the_run().data.tags["fit.key"] == "new"


def test_a_second_process_of_the_same_run_waits_until_the_first_has_ended(tracked: Path) -> None:
    first, seconds = RunTracker("recipe", "flow-1"), []
    thread = threading.Thread(target=lambda: seconds.append(RunTracker("recipe", "flow-1")))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and not seconds
    first.end("FAILED")
    thread.join(60)
    assert is_running_here("flow-1")
    seconds[0].end("FINISHED")


def test_a_tracker_that_is_closed_without_an_end_lets_the_run_be_tried_again(tracked: Path) -> None:
    with contextlib.closing(RunTracker("recipe", "flow-1")):
        pass
    with Outbox("flow-1").claim_run() as mine:
        assert mine
