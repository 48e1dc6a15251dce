"""The specification of a registered version to predict with: its model, its columns, and how its rows are read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import ValidationError

from tasks.cache.results import PinnedVersion
from tasks.jobs.hardware import mixed_precision, visible_gpus
from tasks.registry import lineage
from tasks.registry.version_signatures import verify_tags
from tasks.registry.versions import (
    CALIBRATION_TAG,
    COLUMNS_TAG,
    PRECISION_TAG,
    READING_TAG,
    TASK_TAG,
    MaxLength,
    TaskTag,
    damaged_tag,
    identify,
    need_model,
    need_version,
    read_alias_names,
    read_name,
    read_tag,
)
from tasks.tracking.connection import FIT_TAG, MAX_LENGTH_TAG, connect, mlflow_errors
from training import task_types
from training.evaluation.stored_calibration import Calibration
from training.problems import UserError, nearest
from training.recipe import Data
from training.recipe.filters import parse_filter
from training.recipe.reading_rules import ReadingRules
from training.recipe.tables.formats import FORMATS
from training.recipe.validation import override_reading
from training.task_types import TASK_TYPES
from training.task_types.text_embedding import TextEmbedding

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True)
class ModelSpec:
    """A registered version, and the facts needed to predict with it."""

    uri: str
    """The version's URI in MLflow."""
    max_length: int
    """Tokens after which a text is truncated."""
    task: Mapping[str, Any]
    """The task type and its options, as `task_types.load` takes them."""
    columns: Mapping[str, str]
    """The training data's names for the columns of the task type, in its order."""
    name: str = ""
    version: str = ""
    digest: str = ""
    """Of its folder: weights, configuration and tokenizer. For a version that this project did not register: registry,
    version and creation time."""
    key: str | None = None
    """Its artifact of `fit`, which a store may still have."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """The number format in which it predicts here: that of its training, if this machine computes in it."""
    calibration: Calibration | None = None
    """None: probabilities are the model's own."""
    reading: list[dict[str, Any]] | None = None
    """How its recipe reads rows: `sets` of ReadingRules; None for a version of an earlier release of this project."""
    rules: ReadingRules = field(default_factory=ReadingRules)
    """How its rows are read, after `read_by`."""

    @property
    def pinned(self) -> PinnedVersion:
        """The version as the functions of tasks.registry.pinned_versions take it."""
        return PinnedVersion(
            name=self.name,
            version=self.version,
            model=self.digest,
            key=self.key,
            max_length=self.max_length,
            options=dict(self.task["options"]),
        )


def find_model(name: str, alias: str = "", version: str = "", own_task: str = "") -> ModelSpec:
    """The version with this number or this alias; by default the champion.

    A registry may name any code as a task type: code that is not the project's own must be `own_task`. Raises UserError
    for other code and for an unknown model, alias or version, and MlflowFailed if MLflow does not answer.
    """
    with mlflow_errors():
        client = connect()
        model = need_model(client, name)
        chosen = {"version": version} if version else {"alias": alias or read_alias_names(model).champion}
        found = need_version(client, model, **chosen)
        verify_tags(found)
    version_name = f"version {found.version} of {name!r}"
    if not {TASK_TAG, COLUMNS_TAG, MAX_LENGTH_TAG} <= found.tags.keys():
        message = (
            f"{version_name} has no tags with its task and columns: run its recipe again to register one that has."
        )
        raise UserError.of("option", "NAME", message)
    task = read_tag(found, TASK_TAG, TaskTag)
    if task["task"] not in TASK_TYPES and task["task"] != own_task:
        message = (
            f"{version_name} has a task type of its author: to run that code, as it is here, set --task {task['task']}."
        )
        raise UserError.of("option", "--task", message)
    columns = read_tag(found, COLUMNS_TAG, dict[str, str])
    if not columns.keys() <= task_types.class_of(task["task"]).columns.keys():
        raise damaged_tag(found, COLUMNS_TAG, found.tags[COLUMNS_TAG])
    return ModelSpec(
        uri=f"models:/{name}/{found.version}",
        max_length=read_tag(found, MAX_LENGTH_TAG, MaxLength),
        task=task,
        columns=columns,
        name=name,
        version=str(found.version),
        digest=identify(found),
        key=read_name(found, FIT_TAG),
        mixed_precision=_precision_here(found.tags.get(PRECISION_TAG, "no")),
        calibration=_read_calibration(found, task["task"]),
        reading=_read_reading(found),
    )


def _read_calibration(version: ModelVersion, task: str) -> Calibration | None:
    calibration: Calibration | None = read_tag(version, CALIBRATION_TAG, Calibration | None)
    has_many = task == "multi-label-classification"
    if calibration and task in TASK_TYPES and has_many != (calibration.function == "sigmoid"):
        raise damaged_tag(version, CALIBRATION_TAG, version.tags[CALIBRATION_TAG])
    return calibration


def _read_reading(version: ModelVersion) -> list[dict[str, Any]] | None:
    """The sets of the version's tag. Raises UserError if rows cannot be read by them."""
    sets: list[dict[str, Any]] | None = read_tag(version, READING_TAG, list[dict[str, Any]] | None)
    if sets == []:
        raise damaged_tag(version, READING_TAG, "[]")
    try:
        for one in sets or ():
            rules = ReadingRules(sets=[one])
            rules.data(one["source"] if one.get("source") in FORMATS else "csv")
            rules.format_of("rows")
            if one.get("filter"):
                parse_filter(one["filter"])
    except (ValueError, LookupError, TypeError, AttributeError, UserError) as error:
        raise damaged_tag(version, READING_TAG, version.tags[READING_TAG]) from error
    return sets


def read_by(model: ModelSpec, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """The version with the rules by which its rows are read: those of its recipe, with other values of fields of
    `data`. Raises UserError with every mistake in these, and MlflowFailed."""
    rules = override_reading(_recipe_rules(model), overrides or {}, model.task, model.columns)
    return replace(model, rules=rules, columns=rules.columns(model.columns))


def with_prompt(model: ModelSpec, column: str | None) -> ModelSpec:
    """The version with the prompt of this column of its training data before each text: documents may have another
    prompt than queries. None: as its recipe says. Raises UserError for another column, and for other task types."""
    if column is None:
        return model
    task_type = task_types.class_of(model.task["task"])
    if not issubclass(task_type, TextEmbedding):
        message = f"{model.name} is a model for {model.task['task']}, and prompts are for embeddings: leave it out."
        raise UserError.of("option", "prompt", message)
    if column not in (known := task_type(model.task["options"]).prompt_columns()):
        message = f"{column!r} is no column of {model.task['task']}: choose from {', '.join(known)}."
        raise UserError.of("option", "prompt", message + nearest(column, known))
    return replace(model, task={**model.task, "options": {**model.task["options"], "predicted_prompt": column}})


def _recipe_rules(model: ModelSpec) -> ReadingRules:
    """The rules of the version's recipe; the defaults if it is unknown."""
    if model.reading is not None:
        return ReadingRules(sets=model.reading)
    record = lineage.find_record_of_version(f"{model.name}/{model.version}")
    if record is None:  # it was registered by no run of this project
        return ReadingRules()
    with contextlib.suppress(ValidationError):  # by another version of it
        return ReadingRules.of(Data.model_validate(record[lineage.RECIPE_WITHOUT_DEFAULTS]["data"]))
    return ReadingRules()


def _precision_here(trained: str) -> Literal["no", "bf16", "fp16"]:
    """The number format of a version's training, if this machine computes in it."""
    fits = trained == mixed_precision() or (trained == "fp16" and bool(visible_gpus()))
    return cast(Literal["no", "bf16", "fp16"], trained if fits else "no")
