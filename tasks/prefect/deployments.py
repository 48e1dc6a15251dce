"""Deployment files: complete validation, deployment to the Prefect server, and their JSON Schema for editors."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tasks import servers
from tasks.prefect import run_folder
from tasks.servers import PREFECT, VARIABLES, ServicesFailed
from training.jobs.search_path import start_variables
from training.problems import Problem, UserError, collected, nearest, relocated
from training.recipe import (
    SWEEP_ENTRYPOINT,
    BatchPrediction,
    Recipe,
    Sweep,
    parse,
    parse_batch_prediction,
    parse_sweep,
    read_entries,
)
from training.recipe.overrides import read_yaml
from training.recipe.tables.task_types import TASK_TYPES
from training.recipe.task_specification import specification_class

PREFECT_PROGRAM = """
import runpy
from tasks.environment_variables import ignore_prefect_settings_here
ignore_prefect_settings_here()
runpy.run_module("prefect", run_name="__main__", alter_sys=True)
"""
BATCH_PREDICT = "flows.batch_predict:batch_predict"
# Names of the flows that can be deployed, by entrypoint.
FLOWS = {
    "flows.finetune:finetune": "finetune",
    "flows.retrain:retrain": "retrain",
    SWEEP_ENTRYPOINT: "sweep",
    BATCH_PREDICT: "batch-predict",
    "flows.drift:drift": "drift",
    "flows.evaluate:evaluate": "evaluate",
}

PREDICTION_PARAMETERS = ("prediction", "reason")
"""Those of the flow batch_predict."""
MODEL_FLOWS = {
    "flows.drift:drift": ({"model", "inputs"}, {"thresholds", "task", "data"}),
    "flows.evaluate:evaluate": ({"model", "inputs"}, {"task", "run_code", "data"}),
}
"""The required and the optional parameters of flows that look at a registered model in place of a recipe."""


@dataclass(frozen=True)
class Deployment:
    """One entry of a deployment file."""

    file: Path
    name: str
    flow: str
    pool: str
    paused: tuple[str, ...]
    """Schedules that the file deploys paused, even if they were resumed at the server."""


def read_deployments(files: Sequence[Path]) -> list[Deployment]:
    """Reads the deployments of the files. Raises UserError with the problems of all files."""
    deployments: list[Deployment] = []
    problems: list[Problem] = []
    for file in files:
        with collected(problems):
            deployments += _read_file(file)
    names = [(deployment.flow, deployment.name) for deployment in deployments]
    for name in sorted({name for name in names if names.count(name) > 1}):
        where = ", ".join(
            str(deployment.file) for deployment in deployments if (deployment.flow, deployment.name) == name
        )
        message = f"{'/'.join(name)} is deployed more than once: the last would replace the others."
        problems.append(_build_problem(where, message))
    if problems:
        raise UserError(problems)
    return deployments


def require_server() -> str:
    """Returns the API URL of the Prefect server. Raises UserError if there is no server."""
    from prefect.settings import PREFECT_API_URL

    if not (url := PREFECT_API_URL.value()):
        raise UserError(
            [
                _build_problem(
                    VARIABLES[PREFECT], "there is no Prefect server: start one with `finetune up`, or name yours."
                )
            ]
        )
    return str(url)


def ensure_pools(names: Iterable[str]) -> None:
    """Creates the work pool of `finetune up` if it is missing. Raises UserError if another work pool is missing."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    problems = []
    with get_client(sync_client=True) as client:
        for name in sorted(set(names)):
            try:
                client.read_work_pool(name)
            except ObjectNotFound:
                if name == servers.POOL:
                    template = ProcessWorker.get_default_base_job_template()
                    client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
                else:
                    message = f"there is no work pool {name!r}: prefect work-pool create {name} --type process"
                    problems.append(_build_problem("work_pool.name", message))
    if problems:
        raise UserError(problems)


def deploy(file: Path) -> None:
    """Deploys all deployments of the file. Raises ServicesFailed with Prefect's output."""
    document = read_yaml(file)
    document.setdefault("pull", [{run_folder.STEP: {"directory": os.getcwd()}}])
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        complete = Path(folder, "prefect.yaml")
        complete.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
        options = ["--no-prompt", "deploy", "--all", "--prefect-file", str(complete)]
        # Prefect puts its working directory first in the search path. Steps of the user's may name files in it.
        has_steps = any({"build", "push"} & part.keys() for part in [document, *document["deployments"]])
        env = {**os.environ, **start_variables()}
        run = subprocess.run(
            [sys.executable, "-c", PREFECT_PROGRAM, *options],
            env=env,
            cwd=None if has_steps else folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if run.returncode:
        raise ServicesFailed(f"{file} was not deployed. Prefect's output:\n{(run.stdout + run.stderr).strip()}")


def _read_file(file: Path) -> list[Deployment]:
    entries = read_entries(file)
    problems = _find_ignored(file, entries)
    deployments = []
    for number, entry in enumerate(entries):
        name, pool = entry.get("name"), entry.get("work_pool")
        where = f"{file}: {name or f'deployments[{number}]'}"
        flow = FLOWS.get(str(entry.get("entrypoint")))
        if not name:
            problems.append(_build_problem(where, "a deployment needs a name."))
        if not isinstance(pool, dict) or not pool.get("name"):
            message = f"a deployment needs a work pool, whose workers run it: {{name: {servers.POOL}}}."
            problems.append(_build_problem(f"{where}.work_pool", message))
        else:
            deployments.append(Deployment(file, str(name), str(flow), str(pool["name"]), _list_paused(entry)))
        if flow is None:
            message = f"{entry.get('entrypoint')!r} is not {' or '.join(FLOWS)}."
            problems.append(
                _build_problem(f"{where}.entrypoint", message + nearest(str(entry.get("entrypoint")), FLOWS))
            )
            continue
        with collected(problems), relocated(partial("{}: {}".format, where)):
            _check_parameters(str(entry["entrypoint"]), entry.get("parameters") or {})
    if problems:
        raise UserError(problems)
    return deployments


def _check_parameters(entrypoint: str, parameters: Mapping[str, Any]) -> None:
    """Raises UserError with the mistakes in the parameters of a flow."""
    if entrypoint == SWEEP_ENTRYPOINT:
        parse_sweep(
            parameters.get("recipe", {}),
            parameters.get("sweep"),
            parameters.get("overrides"),
            parameters.get("trials"),
        )
        return
    if entrypoint in MODEL_FLOWS:
        if problems := [*_check_model_parameters(parameters, *MODEL_FLOWS[entrypoint])]:
            raise UserError(problems)
        return
    if entrypoint != BATCH_PREDICT:
        parse(parameters.get("recipe", {}), parameters.get("overrides"))
        return
    problems = [
        _build_problem(f"parameters.{name}", f"no such parameter: choose from {', '.join(PREDICTION_PARAMETERS)}.")
        for name in parameters
        if name not in PREDICTION_PARAMETERS
    ]
    with collected(problems), relocated(lambda where: f"prediction.{where}"):
        parse_batch_prediction(parameters.get("prediction", {}))
    if problems:
        raise UserError(problems)


def _check_model_parameters(parameters: Mapping[str, Any], required: set[str], optional: set[str]) -> Iterator[Problem]:
    for name in sorted(required - parameters.keys()):
        yield _build_problem(
            f"parameters.{name}", "is missing: name a registered model, or files, folders, globs and URLs."
        )
    for name in sorted(parameters.keys() - required - optional):
        known = sorted(required | optional)
        yield _build_problem(f"parameters.{name}", f"is unknown: choose from {', '.join(known)}.{nearest(name, known)}")


def _find_ignored(file: Path, entries: Sequence[dict[str, Any]]) -> list[Problem]:
    """Finds problems that Prefect ignores silently: unknown fields, and values that it cannot read."""
    from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel

    problems = []
    fields = DeploymentConfig.model_fields
    for entry in entries:
        for number, schedule in enumerate(entry.get("schedules") or ()):
            where = f"{file}: {entry.get('name')}.schedules[{number}]"
            problems += [_build_problem(where, message) for message in _check_schedule(schedule)]
        for field in entry.keys() - fields.keys():
            where = f"{file}: {entry.get('name')}.{field}"
            problems.append(_build_problem(where, f"Prefect has no such field.{nearest(field, fields)}"))
    try:
        without_schedules = [{name: value for name, value in entry.items() if name != "schedules"} for entry in entries]
        PrefectYamlModel.model_validate({"deployments": without_schedules})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            place = ".".join(map(str, detail["loc"]))
            problems.append(_build_problem(f"{file}: {place}", f"{detail['msg']}, not {detail['input']!r}."))
    return problems


def _list_paused(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The paused schedules of an entry, by slug or by time."""
    schedules = [one for one in entry.get("schedules") or () if isinstance(one, dict) and one.get("active") is False]
    return tuple(str(next(filter(None, map(one.get, ("slug", "cron", "interval", "rrule"))), one)) for one in schedules)


def _check_schedule(schedule: Any) -> Iterator[str]:
    from prefect.cli.deploy._schedules import _schedule_config_to_deployment_schedule

    try:
        _schedule_config_to_deployment_schedule(schedule)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            place = ".".join(map(str, detail["loc"])) or "schedule"
            yield f"{place} {schedule.get(place)!r}: {detail['msg'].removeprefix('Value error, ')}."
    except (AttributeError, ValueError):
        yield f"{schedule!r} is not a schedule: write a mapping with cron, interval or rrule."


def _build_problem(where: str, message: str) -> Problem:
    return Problem(kind="deployment", where=where, message=message)


_ANCHORS = "Recipes that several entries share: `recipe: &recipe` here, and `recipe: *recipe` in each entry."
_OVERRIDES = 'Fields of the recipe by dotted name, such as {"training.learning_rate": 3e-5}.'
_FORCE = "For the flow finetune: stages to run although their output is stored."
_TRIALS = "For the flow sweep: the number of trials, instead of the sweep's own."
_MODEL = "For the flows drift and evaluate: the registered model, NAME, NAME@ALIAS or NAME/VERSION."
_INPUTS = "For the flows drift and evaluate: files, folders, globs and URLs of new rows."
_THRESHOLDS = 'For the flow drift: fields of release.drift, such as {"auc": 0.6}.'
_TASK = "For the flows drift and evaluate: the class of the model's task type if it is your own; its code is run."
_REASON = "For the flows retrain and batch_predict: why a run is started, shown with the run."
_DATA = 'For the flows drift and evaluate: fields of data by which these rows are read, such as {"delimiter": ";"}.'
_RUN_CODE = "For the flow evaluate: whether to run other code that the model's recipe names, such as metrics."


def deployment_schema() -> dict[str, Any]:
    """Prefect's own schema of its YAML file, closed against misspelt fields, with the recipe in its parameters."""
    from prefect.cli.deploy._models import PrefectYamlModel

    schema = PrefectYamlModel.model_json_schema()
    recipe = _recipe_schema()
    sweep, prediction = Sweep.model_json_schema(), BatchPrediction.model_json_schema()
    definitions = {**schema["$defs"], **recipe.pop("$defs"), **sweep.pop("$defs")}
    definitions |= {"Recipe": recipe, "Sweep": sweep, "BatchPrediction": prediction}
    entry = definitions["DeploymentConfig"]
    shared = {"$ref": "#/$defs/Recipe"}
    entry["properties"] |= {
        "name": {"type": "string", "minLength": 1, "description": "The deployment's name."},
        "entrypoint": {"enum": list(FLOWS), "description": "The flow that the deployment runs."},
        "parameters": {
            "type": "object",
            "properties": {
                "recipe": shared,
                "sweep": {"$ref": "#/$defs/Sweep"},
                "trials": {"type": "integer", "minimum": 1, "description": _TRIALS},
                "overrides": {"type": "object", "description": _OVERRIDES},
                "force": {"type": "array", "items": {"type": "string"}, "description": _FORCE},
                "prediction": {"$ref": "#/$defs/BatchPrediction"},
                "reason": {"type": "string", "description": _REASON},
                "model": {"type": "string", "description": _MODEL},
                "inputs": {"type": "array", "items": {"type": "string"}, "description": _INPUTS},
                "thresholds": {"type": "object", "description": _THRESHOLDS},
                "task": {"type": "string", "description": _TASK},
                "run_code": {"type": "boolean", "description": _RUN_CODE},
                "data": {"type": "object", "description": _DATA},
            },
            "additionalProperties": False,
        },
    }
    trained = [entrypoint for entrypoint in FLOWS if entrypoint not in (BATCH_PREDICT, *MODEL_FLOWS)]
    trains = {"required": ["recipe"], "properties": {"prediction": False, "model": False, "inputs": False}}
    predicts = _only({"prediction"}, PREDICTION_PARAMETERS)
    looks = {flow: _only(required, required | optional) for flow, (required, optional) in MODEL_FLOWS.items()}
    of_flows = [(trained, trains), ([BATCH_PREDICT], predicts), *(([flow], one) for flow, one in looks.items())]
    entry |= {"allOf": [_if_flow(entrypoints, parameters) for entrypoints, parameters in of_flows]}
    entry |= {"required": ["name", "entrypoint", "parameters"], "additionalProperties": False}
    schema["properties"]["definitions"] = {"type": "object", "properties": {"recipe": shared}, "description": _ANCHORS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Deployments of finetune",
        "type": "object",
        "properties": schema["properties"],
        "required": ["deployments"],
        "$defs": definitions,
    }


def _only(required: Iterable[str], names: Iterable[str]) -> dict[str, Any]:
    """The schema of parameters with these names."""
    return {"required": sorted(required), "propertyNames": {"enum": sorted(names)}}


def _if_flow(entrypoints: Sequence[str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of entries whose parameters are those of their flow, if it is one of these."""
    of_flow = {"required": ["entrypoint"], "properties": {"entrypoint": {"enum": [*entrypoints]}}}
    return {"if": of_flow, "then": {"properties": {"parameters": parameters}}}


def _recipe_schema() -> dict[str, Any]:
    """The recipe's schema; `options` has the fields of the task type that the recipe names."""
    schema = Recipe.model_json_schema()
    definitions, branches = schema["$defs"], []
    for name in TASK_TYPES:
        options = specification_class(name).Options.model_json_schema()
        definitions |= options.pop("$defs", {})
        branches.append({"if": {"properties": {"task": {"const": name}}}, "then": {"properties": {"options": options}}})
    return {**schema, "allOf": branches}
