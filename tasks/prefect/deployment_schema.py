"""The JSON Schema of a deployment file, with which an editor completes and checks recipes."""

from __future__ import annotations

from typing import Any

from tasks.prefect.deployments import BATCH_PREDICT, FLOWS
from training.recipe import BatchPrediction, Recipe, Sweep
from training.recipe.tables.task_types import TASK_TYPES
from training.recipe.task_specification import specification_class

_ANCHORS = "Recipes that several entries share: `recipe: &recipe` here, and `recipe: *recipe` in each entry."
_OVERRIDES = 'Fields of the recipe by dotted name, such as {"training.learning_rate": 3e-5}.'
_FORCE = "For the flow finetune: stages to run although their output is stored."
_TRIALS = "For the flow sweep: the number of trials, instead of the sweep's own."
_MODEL = "For the flows drift and evaluate: the registered model, NAME, NAME@ALIAS or NAME/VERSION."
_INPUTS = "For the flows drift and evaluate: files, folders, globs and URLs of new rows."
_THRESHOLDS = 'For the flow drift: fields of release.drift, such as {"auc": 0.6}.'
_TASK = "For the flows drift and evaluate: the class of the model's task type if it is your own; its code is run."
_REASON = "For the flows retrain and batch_predict: why a run is started, shown with the run."
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
            },
            "anyOf": [{"required": ["recipe"]}, {"required": ["prediction"]}, {"required": ["model"]}],
            "additionalProperties": False,
        },
    }
    predicts = {"properties": {"entrypoint": {"const": BATCH_PREDICT}}}
    entry |= {"if": predicts, "then": _requires("prediction", "recipe"), "else": _requires("recipe", "prediction")}
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


def _requires(parameter: str, other: str) -> dict[str, Any]:
    """The parameters of an entry have this one and not the other."""
    return {"properties": {"parameters": {"required": [parameter], "properties": {other: False}}}}


def _recipe_schema() -> dict[str, Any]:
    """The recipe's schema; `options` has the fields of the task type that the recipe names."""
    schema = Recipe.model_json_schema()
    definitions, branches = schema["$defs"], []
    for name in TASK_TYPES:
        options = specification_class(name).Options.model_json_schema()
        definitions |= options.pop("$defs", {})
        branches.append({"if": {"properties": {"task": {"const": name}}}, "then": {"properties": {"options": options}}})
    return {**schema, "allOf": branches}
