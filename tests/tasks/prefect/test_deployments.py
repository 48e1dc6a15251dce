"""Deployment files of batch predictions: checked before anything is deployed."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tasks.prefect.deployments import MODEL_FLOWS, deployment_schema, read_deployments
from tests.flows.forked import finetune
from tests.fork_server import NEW_PYTHON
from tests.raised import raised_problems

PREDICTION = {"model": "small", "input": ["inbox"], "output": "answers", "keep": ["id"]}


def write(folder: Path, parameters: Any, **entry: Any) -> Path:
    file = folder / "batch.yaml"
    entry = {
        "name": "mine",
        "entrypoint": "flows.batch_predict:batch_predict",
        "work_pool": {"name": "finetune"},
        "parameters": parameters,
    } | entry
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    return file


def test_every_mistake_in_the_parameters_is_named_with_its_entry(tmp_path: Path) -> None:
    file = write(tmp_path, {"prediction": PREDICTION | {"modl": "x", "batch_size": 0}, "reson": "night"})
    assert {problem.where for problem in raised_problems(read_deployments, [file])} == {
        f"{file}: mine: parameters.reson",
        f"{file}: mine: prediction.modl",
        f"{file}: mine: prediction.batch_size",
    }


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        ({"prediction": PREDICTION, "reason": "night"}, True),
        ({"prediction": PREDICTION | {"max_error_rate": 2}}, False),
        ({"prediction": PREDICTION | {"modl": "x"}}, False),
        ({"recipe": {}}, False),
        ({}, False),
    ],
)
def test_an_editor_is_shown_the_parameters_of_each_flow(tmp_path: Path, parameters: Any, fits: bool) -> None:
    document = yaml.safe_load(write(tmp_path, parameters).read_text())
    schema = json.loads(json.dumps(deployment_schema()))
    assert jsonschema.Draft202012Validator(schema).is_valid(document) == fits


@pytest.mark.parametrize("entrypoint", MODEL_FLOWS)
def test_a_deployment_may_set_every_parameter_of_a_flow_that_looks_at_a_model(tmp_path: Path, entrypoint: str) -> None:
    module, name = entrypoint.split(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), name).fn).parameters.values()
    required = {each.name for each in parameters if each.default is each.empty}
    assert MODEL_FLOWS[entrypoint] == (required, {each.name for each in parameters} - required)
    example: dict[str, Any] = {"model": "small", "inputs": ["new.csv"], "thresholds": {"auc": 0.6}, "task": ""}
    example |= {"run_code": False, "data": {"delimiter": ";"}}
    given = {each.name: example[each.name] for each in parameters}
    file = write(tmp_path, given, entrypoint=entrypoint)
    read_deployments([file])
    schema = jsonschema.Draft202012Validator(json.loads(json.dumps(deployment_schema())))
    schema.validate(yaml.safe_load(file.read_text()))
    for mistake in ({"model": "small"}, given | {"overrides": {}}):
        assert not schema.is_valid(yaml.safe_load(write(tmp_path, mistake, entrypoint=entrypoint).read_text()))


@pytest.mark.slow
def test_a_deployment_is_registered_with_its_schedule_and_its_trigger(
    home: Path, prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    trigger = {
        "type": "event",
        "expect": ["finetune.data.updated"],
        "match": {"prefect.resource.id": "finetune.data.mine"},
        "parameters": {"reason": "finetune.data.updated"},
    }
    schedule = {"cron": "0 5 * * *", "timezone": "UTC", "slug": "nightly", "active": False}
    file = write(tmp_path, {"prediction": PREDICTION}, schedules=[schedule], triggers=[trigger])
    server = {"PREFECT_API_URL": str(PREFECT_API_URL.value())}
    # Prefect's clients import it where it is found.
    (tmp_path / "brotli.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    run = finetune(home, "deploy", str(file), python=NEW_PYTHON, **server)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{file}: prefect deployment run batch-predict/mine --watch" in run.stdout
    assert f"{file}: schedules paused in this file (active: false): nightly" in run.stdout
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment_by_name("batch-predict/mine")
        assert deployed.pull_steps == [{"tasks.prefect.run_folder.remember": {"directory": str(tmp_path)}}]
        assert not (tmp_path / "imported").exists()
        assert deployed.parameters == {"prediction": PREDICTION} and len(deployed.schedules) == 1
        fields = deployed.parameter_openapi_schema["definitions"]["BatchPrediction"]["properties"]
        assert all(field.get("description") for field in fields.values())
        assert any("mine" in automation.name for automation in client.read_automations())
