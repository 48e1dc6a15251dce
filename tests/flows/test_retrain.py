"""`retrain`: nothing where nothing changed, else the stages of a fine-tune; started by an event too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import AwaitingRetry, Cancelled, Pending
from safetensors.numpy import load_file, save_file

from flows import retrain
from flows.cli.main import main
from flows.pipeline import pipeline
from flows.plan import find_unchanged_run, list_changes
from tasks.cache.history import History
from tasks.cache.planner import PlannedStage, Planner
from tasks.cache.results import Lock
from tasks.stages.resolve import lock_file
from tests.flows.small import FinishedRun, write_project, write_rows
from training.problems import UserError
from training.recipe import load, parse

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LOOKS = """
import json, sys
from flows.retrain import retrain
from training.recipe import parse
state = retrain(parse(json.loads(sys.argv[1])), return_state=True)
heavy = [name for name in ("torch", "transformers", "mlflow") if name in sys.modules]
print(json.dumps([state.type.value, state.name, state.message, state.result(), heavy]))
"""


def test_an_unchanged_recipe_ends_unchanged_and_loads_neither_torch_nor_mlflow(
    finished: FinishedRun, server: dict[str, str]
) -> None:
    recipe = json.dumps(load(finished.file).model_dump(mode="json", exclude_unset=True))
    before = sorted(finished.home.glob("runs/*"))
    env = {**os.environ, **server, "FINETUNE_HOME": str(finished.home), "PREFECT_LOGGING_LEVEL": "ERROR"}
    child = subprocess.run([sys.executable, "-c", LOOKS, recipe], cwd=ROOT, env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    kind, name, message, result, heavy = json.loads(child.stdout.splitlines()[-1])
    assert (kind, name, heavy) == ("COMPLETED", "Unchanged", [])
    run = finished.result["flow_run_id"]
    assert message == f"Nothing changed since flow run {run}, which made small version 1."
    assert result["flow_run_id"] == run and {stage["state"] for stage in result["stages"]} == {"cached"}
    assert sorted(finished.home.glob("runs/*")) == before  # nothing for MLflow either


def test_changes_are_listed_and_their_stages_run_in_the_same_flow_run(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: None
) -> None:
    shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "home"))
    file = write_project(tmp_path / "project")
    write_rows(file.parent / "train.csv", 260, seed=1)
    planner = Planner("small")
    pipeline(planner, load(file))
    assert find_unchanged_run("small", planner.rows) is None
    assert list_changes("small", planner.rows) == [f"load_data: {file.parent / 'train.csv'} changed"]

    # What takes less time than training, and is judged anew as well.
    state = retrain.retrain(load(finished.file), {"evaluation.metrics": ["accuracy", "f1"]}, return_state=True)
    result = state.result()
    assert (state.name, result["model"]["registered"]) == ("Completed", "small/1")
    assert result["verdict"]["decision"] == "promote" and result["flow_run_id"] == str(state.state_details.flow_run_id)
    ran = {stage["name"] for stage in result["stages"] if stage["state"] == "ran"}
    assert "score" in ran and not ran & {"load_data", "load_model", "tokenize", "fit", "predict"}
    (why,) = result["why"]
    assert why.startswith("score: evaluation.metrics ")


def test_a_run_that_is_tried_again_goes_on_with_its_own_pins_and_does_not_look(
    finished: FinishedRun, home: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: None
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow_sync

    recipe, calls = load(finished.file), []
    monkeypatch.setattr(retrain, "fine_tune", lambda recipe, changes=(): calls.append("trains") or {})
    monkeypatch.setattr(retrain, "Planner", lambda recipe, **more: calls.append("looks"))
    monkeypatch.setattr(retrain, "pipeline", lambda planner, recipe: (_ for _ in ()).throw(UserError([])))
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(retrain.retrain, parameters={"recipe": recipe})
    parameters = {"recipe": recipe, "overrides": None, "reason": None}
    run_flow_sync(retrain.retrain, flow_run=run, parameters=parameters)
    lock_file(str(run.id)).parent.mkdir(parents=True)
    lock_file(str(run.id)).touch()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
        run_flow_sync(retrain.retrain, flow_run=client.read_flow_run(run.id), parameters=parameters)
    assert calls == ["looks", "trains", "trains"]


def test_a_hub_that_does_not_answer_is_reported_and_counted_and_then_fails_the_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: None
) -> None:
    recipe = load(ROOT / "deployments" / "demo.yaml")
    done = {"flow_run_id": "f61274fa", "model": {"registered": None}, "stages": [], "verdict": None}
    monkeypatch.setattr(retrain, "find_unchanged_run", lambda name, rows: done)

    def night(*unreachable: str) -> tuple[str, str, dict[str, Any] | None]:
        lock = Lock(unreachable=[*unreachable])
        monkeypatch.setattr(retrain, "pipeline", lambda planner, recipe: SimpleNamespace(lock=lock))
        state = retrain.retrain(recipe, {"release.retrain.max_unreachable": 2}, return_state=True)
        return state.name, state.message, None if state.is_failed() else state.result()

    down = [night("me/rows") for _ in range(3)]
    assert [name for name, *_ in down] == ["HubUnreachable", "HubUnreachable", "Failed"]
    warning = "The Hub did not answer whether me/rows changed (run 2 in a row without an answer; 2 are allowed)."
    name, message, result = down[1]
    assert message == f"{warning} Nothing changed since flow run f61274fa." and result is not None
    assert result["hub_unreachable"] == {"repositories": ["me/rows"], "runs": 2, "max_unreachable": 2}
    assert result["warnings"] == [warning]
    assert down[2][1].startswith("release.retrain.max_unreachable: The Hub did not answer") and "run 3" in down[2][1]
    name, message, result = night()
    assert (name, result and result["warnings"]) == ("Unchanged", [])
    assert night("me/rows")[0] == "HubUnreachable"


def test_a_stage_that_no_run_needs_any_more_is_a_change_with_a_reason(home: Path) -> None:
    stages = [{"name": name, "key": name} for name in ("fit", "compare")]
    History("small").remember_completed({"stages": stages, "model": {}})
    foreseen = [PlannedStage("resolve", "ran", "another"), PlannedStage("fit", "cached", "fit")]
    assert find_unchanged_run("small", foreseen) is None
    assert list_changes("small", foreseen) == ["compare: no longer part of a run"]


def test_an_event_starts_the_deployment_that_waits_for_it_and_while_one_goes_on_the_next_is_cancelled(
    home: Path, server: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo's own file: its trigger is Prefect's automation, and no worker is needed to see what it schedules."""
    from prefect.client.orchestration import get_client

    for name, value in server.items():
        monkeypatch.setenv(name, value)
    assert main(["data-updated", "demo"]) == 2
    assert "no deployment is started by finetune.data.updated of 'demo'" in capsys.readouterr().err
    file = ROOT / "deployments" / "demo.yaml"
    assert main(["deploy", str(file)]) == 0
    runs = []
    for _ in range(2):
        assert main(["data-updated", "demo"]) == 0
        line = re.search(r"^retrain/demo: [\w-]+ \(([0-9a-f-]{36})\) is \w+\n\Z", capsys.readouterr().out, re.MULTILINE)
        assert line is not None
        runs.append(uuid.UUID(line[1]))
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(runs[0])
        # As a worker does that takes them.
        taken = [client.set_flow_run_state(one, Pending()).state for one in runs]
        assert [state and state.name for state in taken] == ["Pending", "Cancelled"]
        client.set_flow_run_state(runs[0], Cancelled(), force=True)
        (schedule,) = client.read_deployment_by_name("retrain/demo").schedules
    assert parse(run.parameters["recipe"]) == load(file) and run.parameters["reason"] == "finetune.data.updated"
    assert not schedule.active
    assert main(["data-updated", "dmo"]) == 2
    assert "Did you mean 'demo'?" in capsys.readouterr().err


def test_the_server_makes_runs_of_an_active_schedule(server: dict[str, str]) -> None:
    """The scheduler's query of each minute, which would fail unseen with an unfit version of SQLAlchemy."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import IntervalSchedule

    with get_client(sync_client=True) as client:
        schedule = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(days=1)), active=True)
        deployment = client.create_deployment(client.create_flow(retrain.retrain), "often", schedules=[schedule])
        client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json={"min_runs": 2})
        runs = client.get_scheduled_flow_runs_for_deployments([deployment], datetime.now(UTC) + timedelta(days=9))
        client.delete_deployment(deployment)
    assert len(runs) >= 2


def test_a_new_teacher_is_a_change_that_the_flow_names_and_trains_from(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: None
) -> None:
    shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "home"))
    (trained,) = finished.home.glob("artifacts/fit/*/model")
    teacher = shutil.copytree(trained, tmp_path / "teacher")
    recipe = load(finished.file)
    taught = {"name": "taught", "release.registry": None, "training.num_train_epochs": 1}
    taught |= {"training.teacher": {"source": "folder", "path": str(teacher)}}

    first = retrain.retrain(recipe, taught, return_state=True).result()
    assert {stage["name"]: stage["state"] for stage in first["stages"]}["teacher_outputs"] == "ran"
    assert retrain.retrain(recipe, taught, return_state=True).name == "Unchanged"
    weights = load_file(teacher / "model.safetensors")
    save_file({name: weight * 2 for name, weight in weights.items()}, teacher / "model.safetensors", {"format": "pt"})
    second = retrain.retrain(recipe, taught, return_state=True).result()
    assert f"teacher_outputs: model.safetensors of the teacher {teacher} changed" in second["why"]
    ran = {stage["name"] for stage in second["stages"] if stage["state"] == "ran"}
    assert {"teacher_outputs", "fit"} <= ran and not ran & {"load_data", "load_model", "tokenize"}
