"""MLflow's logged models: the metrics of an exported model, with the rows on which they were computed."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, Run
from mlflow.exceptions import MlflowException

from tasks.cache.results import Artifact, Check, Verdict, Version
from tasks.cache.stage import Row
from tasks.reports.model_reports import SLICES
from tasks.tracking import run_tracker
from tasks.tracking.connection import MODEL_TAG, build_environment, connect, find_or_create_run
from tasks.tracking.mlflow_run import Mlflow, run_of
from tasks.tracking.outbox import Outbox
from tasks.tracking.run_tracker import RunTracker
from tasks.tracking.tracker import Delivery
from tests.arrow import group
from tests.made import artifact
from tests.servers import mlflow_server

CHECK = Check(figure="validation.accuracy", value=0.75, minimum=0.5)
PROMOTED = Verdict(decision="promote", reason="better", checks=[CHECK])
REJECTED = Verdict(decision="reject", reason="worse", checks=[])
CURVE = [
    {"time": 1000.0 + step, "kind": "metrics", "step": step, "values": {"eval_accuracy": value}}
    for step, value in ((10, 0.5), (20, 0.75), (30, 0.25))
]


@pytest.fixture(params=["database", "server"])
def mlflow(
    request: pytest.FixtureRequest, home: Path, tmp_path: Path, fresh_database: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """MLflow as a database in the home, and as a server."""
    monkeypatch.setattr(run_tracker, "LAST_WAIT_S", 600.0)  # of a busy machine
    if request.param == "database":
        request.getfixturevalue("tracked")
        yield
        return
    server = mlflow_server(tmp_path, fresh_database)
    server.start()
    try:
        server.wait(600)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        yield
    finally:
        server.kill()


def rows(texts: list[str]) -> bytes:
    table, file = pa.table({"text": texts}), io.BytesIO()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def load_data() -> Artifact:
    files = {"train.arrow": rows(["a", "b", "c"]), "validation.arrow": rows(["d"]), "validation.slices.arrow": rows([])}
    return artifact("load_data", files, {"train_rows": 3, "validation_rows": 1, "test_rows": None})


def run(
    flow_run: str, verdict: Verdict, version: Version | None, accuracy: float = 0.75, weights: bytes = b"w"
) -> RunTracker:
    """A tracked run whose best checkpoint, at step 20 of 30, was exported."""
    tracker = RunTracker("reviews.v2", flow_run)
    tracker.log_params({"training.learning_rate": "3e-05", "long": "x" * 6000})
    end(tracker, "load_data", load_data())
    tracker.stage_started("fit", "k" * 40)
    tracker.stage_events("fit", [*CURVE, CURVE[1] | {"kind": "speed"}])
    fitted, of_best = {"steps": 30, "best_step": 20}, {"training.load_best_model_at_end": True}
    end(tracker, "fit", artifact("fit", {"model/weights": weights}, fitted, of_best, weights.hex() * 20))
    slices = {"validation": {"genre": [group("drama", 1, accuracy=0.5)]}}
    scored = {"validation": {"accuracy": {"value": accuracy, "low": 0.5}}}
    end(tracker, "score", artifact("score", {SLICES: json.dumps(slices).encode()}, scored))
    end(tracker, "gate", verdict)
    end(tracker, "register", version)
    tracker.end("FINISHED")
    assert tracker.trouble is None
    return tracker


def end(tracker: RunTracker, stage: str, result: Any) -> None:
    key = result.key if isinstance(result, Artifact) else "k" * 40
    tracker.stage_ended(Row(stage, key, "ran", 1.5), result)


def register(flow_run: str) -> Version:
    """Registers a model of the run, as the program of the stage does, without its files."""
    client = connect()
    of_run = find_or_create_run(client, "reviews.v2", flow_run)
    experiment = client.get_run(of_run).info.experiment_id
    model = client.create_logged_model(experiment, name="reviews", source_run_id=of_run)
    client.finalize_logged_model(model.model_id, "READY")
    client.create_registered_model("reviews")
    source = f"models:/{model.model_id}"
    with mock.patch.dict(os.environ, build_environment()):  # MLflow looks for the model by a client of its own
        made = client.create_model_version("reviews", source, of_run, description="The card.", model_id=model.model_id)
    return Version(name="reviews", version=str(made.version))


def models() -> list[LoggedModel]:
    client = connect()
    found = client.search_logged_models([one.experiment_id for one in client.search_experiments()])
    return [client.get_logged_model(one.model_id) for one in found]


def run_page(tracker: RunTracker) -> Run:
    assert tracker.mlflow_run_id is not None
    return connect().get_run(tracker.mlflow_run_id)


@pytest.mark.slow
def test_a_versions_model_has_its_runs_parameters_and_metrics_with_the_rows_of_each_split_and_slice(
    mlflow: None,
) -> None:
    tracker = run("flow-1", PROMOTED, register("flow-1"))
    (model,), page, parts = models(), run_page(tracker), load_data().parts
    assert model.params == page.data.params
    assert page.outputs is not None
    assert [(output.model_id, output.step) for output in page.outputs.model_outputs] == [(model.model_id, 20)]
    on, validation = {one.key: one for one in model.metrics or []}, ("validation", parts["validation.arrow"][:36])
    for name, value in (
        ("score/validation/accuracy/value", 0.75),
        ("score/validation/accuracy/low", 0.5),
        ("score/validation/genre:drama/accuracy", 0.5),
        ("gate/validation/accuracy", 0.75),
        ("fit/eval_accuracy", 0.75),  # of the exported checkpoint, not the last one
    ):
        assert (on[name].value, (on[name].dataset_name, on[name].dataset_digest)) == (value, validation), name
    assert on["fit/eval_accuracy"].step == 20
    # The page of the version tells what that of the run does, without the load and the speed of the machine.
    machine = {name for name in page.data.metrics if name.startswith(("system/", "fit/speed/"))}
    assert {*on} == {*page.data.metrics} - machine and machine >= {"fit/speed/eval_accuracy"}
    assert on["load_data/train_rows"].dataset_name is None
    better = "metrics.`score/validation/accuracy/value` > 0.7"
    for digest, count in ((validation[1], 1), ("another", 0)):
        datasets = [{"dataset_name": "validation", "dataset_digest": digest}]
        assert len(connect().search_logged_models([page.info.experiment_id], better, datasets)) == count
    expected = {MODEL_TAG, "finetune.fit.key", "finetune.verdict", "finetune.verdict_reason", "mlflow.note.content"}
    assert expected <= {*model.tags} and model.tags["mlflow.note.content"] == "The card."


def test_the_rows_of_each_split_are_a_dataset_with_its_use_columns_and_count(mlflow: None) -> None:
    page = run_page(run("flow-1", REJECTED, None))
    assert page.inputs is not None
    inputs = {one.dataset.name: one for one in page.inputs.dataset_inputs}
    context = {name: {tag.key: tag.value for tag in one.tags} for name, one in inputs.items()}
    assert context == {
        "train": {"mlflow.data.context": "training"},
        "validation": {"mlflow.data.context": "validation"},
    }
    found, loaded = inputs["train"].dataset, load_data()
    assert json.loads(found.profile) == {"num_rows": 3} and found.digest == loaded.parts["train.arrow"][:36]
    assert json.loads(found.schema) == {"mlflow_colspec": [{"name": "text", "type": "string", "required": False}]}
    assert json.loads(found.source) == {"uri": f"{loaded.location}/train.arrow"}


@pytest.mark.slow
def test_a_model_that_no_run_registers_is_one_logged_model_of_its_metrics_however_often_it_is_scored(
    mlflow: None,
) -> None:
    first = run("flow-1", REJECTED, None)
    (model,) = models()
    assert (model.name, model.tags["mlflow.model.isExternal"]) == ("reviews_v2", "true")  # MLflow refuses the dot
    assert model.status == "READY" and model.source_run_id == first.mlflow_run_id
    second = run("flow-2", REJECTED, None, accuracy=0.5)
    (model,), page = models(), run_page(second)
    assert page.inputs is not None
    assert [one.model_id for one in page.inputs.model_inputs] == [model.model_id]
    by_run = [(one.run_id, one.value) for one in model.metrics if one.key == "score/validation/accuracy/value"]
    assert sorted(by_run) == sorted([(first.mlflow_run_id, 0.75), (second.mlflow_run_id, 0.5)])
    count = len(model.metrics)
    run("flow-3", REJECTED, None, accuracy=0.5)
    assert len(models()[0].metrics) == count  # a run without news adds nothing
    run("flow-4", REJECTED, None, weights=b"x")
    assert len(models()) == 2


@pytest.mark.slow
def test_a_model_whose_entries_are_delivered_twice_is_as_after_once(
    mlflow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outbox, "trim", lambda outbox: None)
    tracker = run("flow-1", PROMOTED, register("flow-1"))
    run("flow-2", REJECTED, None, weights=b"x")
    before, page = [one.to_dictionary() for one in models()], run_page(tracker).to_dictionary()
    for name in ("flow-1", "flow-2"):
        (outbox := Outbox(name)).mark_delivered(0)
        Delivery(outbox, Mlflow(run_of(outbox))).deliver()
    after = [one.to_dictionary() for one in models()]
    changing = {"last_updated_timestamp"}
    assert [{**one, **dict.fromkeys(changing)} for one in after] == [
        {**one, **dict.fromkeys(changing)} for one in before
    ]
    assert run_page(tracker).to_dictionary() == page


@pytest.mark.parametrize("code", ["ENDPOINT_NOT_FOUND", "RESOURCE_DOES_NOT_EXIST"])
def test_a_server_without_logged_models_gets_the_end_of_the_run(
    tracked: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def search(*arguments: Any, **options: Any) -> None:
        error = MlflowException("there is no such page")
        error.error_code = code
        raise error

    monkeypatch.setattr(MlflowClient, "search_logged_models", search)
    assert run_page(run("flow-1", REJECTED, None)).info.status == "FINISHED"


def test_a_model_that_a_kill_left_unfinished_is_finished_by_the_next_delivery(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outbox, "trim", lambda outbox: None)
    with monkeypatch.context() as killed:
        killed.setattr(
            MlflowClient, "finalize_logged_model", lambda client, model, status: client.get_logged_model(model)
        )
        run("flow-1", REJECTED, None)
    assert [one.status for one in models()] == ["PENDING"]
    (outbox := Outbox("flow-1")).mark_delivered(0)
    Delivery(outbox, Mlflow(run_of(outbox))).deliver()
    assert [one.status for one in models()] == ["READY"]


def test_a_value_that_is_no_number_is_no_metric_of_a_model(tracked: Path) -> None:
    """MLflow would store 0, and find the model by it."""
    run("flow-1", REJECTED, None, accuracy=float("nan"))
    (model,) = models()
    named = {one.key for one in model.metrics or []}
    assert "score/validation/accuracy/low" in named and "score/validation/accuracy/value" not in named


def test_a_version_that_was_deleted_meanwhile_holds_up_no_delivery(mlflow: None) -> None:
    version = register("flow-1")
    connect().delete_model_version(version.name, version.version)
    page = run_page(run("flow-1", PROMOTED, version))
    assert page.info.status == "FINISHED" and page.data.tags["register.version"] == "reviews/1"
