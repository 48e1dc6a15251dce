"""`finetune up`, `deploy`, `status` and `down`, with what Prefect's own commands do between them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tasks.prefect.events import VERDICT
from tests.flows.forked import finetune
from tests.flows.slowly import QUICK
from tests.flows.small import FinishedRun
from tests.machine import Machine, of_home
from tests.waiting import wait_until
from training.jobs.processes import variable


@pytest.fixture
def machine(tmp_path: Path, finished: FinishedRun, fresh_database: Path) -> Iterator[Machine]:
    home = tmp_path / "home"
    # Rows, model and tokens are there; predictions and scores are found again if the weights are the same.
    shutil.copytree(finished.home / "artifacts", home / "artifacts", ignore=shutil.ignore_patterns("fit"))
    shutil.copy(fresh_database, home / "mlflow.db")
    home.chmod(0o700)
    made = Machine(home)
    yield made
    made.finetune("down")


def test_a_deployment_runs_is_cancelled_goes_on_to_the_same_bytes_and_down_leaves_nothing(
    machine: Machine, finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    machine.up()
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, machine.env[name])
    assert machine.env["PREFECT_API_URL"] == f"http://127.0.0.1:{machine.ports[1]}/api"
    again = machine.finetune("up", "--detach")
    assert again.returncode == 0 and "They run already" in again.stdout

    machine.deploy(finished.file)
    flow_run = machine.start("finetune/small", {"training.callbacks": ["tests.flows.slowly:Slowly"]})
    wait_until(machine.trains)
    machine.prefect("flow-run", "cancel", flow_run)
    wait_until(lambda: not [pid for pid in of_home(machine.home) if variable(pid, "PREFECT__FLOW_RUN_ID")], 30)
    wait_until(lambda: machine.state_of(flow_run) == "Cancelled")
    client = MlflowClient(machine.env["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"

    (machine.home / QUICK).touch()
    machine.prefect("flow-run", "retry", flow_run)
    wait_until(lambda: machine.state_of(flow_run) == "Completed", 150)
    (same,) = client.search_runs([experiment.experiment_id])
    assert (same.info.run_id, same.info.status) == (run.info.run_id, "FINISHED")
    assert same.data.tags["fit.state"] == "resumed" and same.data.tags["predict.state"] == "cached"
    assert str(client.get_model_version_by_alias("small", "champion").version) == "1"
    wait_until(lambda: bool(machine.events(VERDICT)), 30)
    (verdict,) = machine.events(VERDICT)
    assert verdict["resource"] == {"prefect.resource.id": "finetune.model.small", "finetune.decision": "promote"}
    sent = verdict["payload"]
    assert (sent["version"], sent["flow_run_id"], sent["mlflow_run_id"]) == ("small/1", flow_run, run.info.run_id)
    assert sent["summary"].startswith("promoted, accuracy ") and sent["reason"]

    assert machine.finetune("down").returncode == 0
    assert of_home(machine.home) == []
    assert machine.finetune("status").returncode == 1


def test_all_mistakes_of_deployment_files_are_reported_before_any_is_deployed(
    tmp_path: Path, finished: FinishedRun
) -> None:
    document = yaml.safe_load(finished.file.read_text())
    (entry,) = document["deployments"]
    good = {**entry, "work_pool": {"name": "finetune"}}
    wrong = {
        "no_pool.yaml": entry,
        "flow.yaml": {**good, "name": "other", "entrypoint": "flows.finetune:fintune"},
        "field.yaml": {**good, "name": "third", "shedules": []},
        "cron.yaml": {**good, "name": "fourth", "schedules": [{"cron": "every day"}]},
        "recipe.yaml": {
            **good,
            "name": "fifth",
            "parameters": {"recipe": {**entry["parameters"]["recipe"], "name": 5}},
        },
        "twice.yaml": {**good, "name": "sixth"},
        "again.yaml": {**good, "name": "sixth"},
    }
    files = []
    for name, one in wrong.items():
        (tmp_path / name).write_text(yaml.safe_dump({"deployments": [one]}))
        files.append(str(tmp_path / name))
    run = finetune(tmp_path / "home", "deploy", *files)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    lines = run.stderr.splitlines()
    assert "no_pool.yaml: small.work_pool: a deployment needs a work pool" in run.stderr
    assert "'flows.finetune:fintune' is not flows.finetune:finetune or flows.retrain:retrain. Did" in run.stderr
    assert "field.yaml: third.shedules: Prefect has no such field. Did you mean 'schedules'?" in run.stderr
    assert "cron.yaml: fourth.schedules[0]: cron 'every day': Invalid cron string" in run.stderr
    assert "recipe.yaml: fifth: name" in run.stderr
    assert "finetune/sixth is deployed more than once" in run.stderr
    assert len(lines) == 6


def test_without_a_server_deploy_fails_with_the_command_that_starts_one(tmp_path: Path, finished: FinishedRun) -> None:
    document = yaml.safe_load(finished.file.read_text())
    document["deployments"][0]["work_pool"] = {"name": "finetune"}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(document))
    run = finetune(tmp_path / "home", "deploy", str(tmp_path / "small.yaml"))
    assert (run.returncode, run.stderr) == (
        2,
        "PREFECT_API_URL: there is no Prefect server: start one with `finetune up`, or name yours.\n",
    )


def test_ports_that_are_taken_are_reported_together(tmp_path: Path) -> None:
    import socket

    with socket.socket() as one, socket.socket() as two:
        ports = []
        for taken in (one, two):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports.append(str(taken.getsockname()[1]))
        run = finetune(tmp_path / "home", "up", "--prefect-port", ports[0], "--mlflow-port", ports[1])
    assert run.returncode == 2
    lines = run.stderr.splitlines()
    assert f"--prefect-port: port {ports[0]} cannot be used (Address already in use)" in lines[-2]
    assert f"--mlflow-port: port {ports[1]} cannot be used" in lines[-1]
